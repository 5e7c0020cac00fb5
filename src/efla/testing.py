"""Input factories, the float64 oracle and error budgets: what every backend must satisfy, here and in your own tests.

    inputs = efla.testing.make_inputs("gated_efla", length=100, kind="mixed_norms")
    efla.testing.assert_matches_oracle(inputs, backend="my-backend")

The oracle and the reference run cost a hundred times what a backend does. To compare several backends, compute them once:

    expected = efla.testing.expect(inputs)
    for backend in ("native", "chunked"):
        efla.testing.assert_matches_oracle(expected, backend)

An error budget is twice the error of a token-by-token run in the same precision on the same inputs, plus one rounding band.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from efla import rules
from efla.errors import check_names
from efla.scans.api import linear_attention
from efla.scans.keys import l2_normalize
from efla.scans.request import compute_dtype, sequence_boundaries

__all__ = [
    "KINDS",
    "Deviation",
    "Expected",
    "ScanInputs",
    "assert_batch_invariant",
    "assert_close",
    "assert_matches_oracle",
    "deviation",
    "expect",
    "low_precision_reference",
    "make_inputs",
    "oracle",
    "run",
]

KINDS = {
    "normal": "key norms between 0.4 and 1.4, where every rule is stable; gates spread over (0, 1)",
    "mixed_norms": "key norms from 1e-18 to 1e18, mixed within each sequence",
    "huge_keys": "every key of norm 1e18",
    "tiny_keys": "every key of norm 1e-18",
    "zero_keys": "all keys zero",
    "repeated_key": "one key repeated at every position",
    "stiff": "beta * lam = 1e4",
    "open_gate": "log_gate exactly 0",
    "nearly_open_gate": "log_gate = -1e-8",
    "closed_gate": "log_gate = -80 at every fifth token",
    "strong_gate": "log_gate = -21 at every token: products of a few decays are denormal in float32",
}

# One rounding band, in units of the last place of the result's largest entry. A sum of K or C products in another order
# moves a result by a few of these; a wrong formula moves it by millions.
_BAND_ULPS = {torch.float64: 4096, torch.float32: 16, torch.bfloat16: 1, torch.float16: 1}
_Part = Callable[[Tensor], Tensor]
_Results = dict[str, Tensor]


@dataclass(frozen=True)
class ScanInputs:
    """Arguments of one call of :func:`efla.linear_attention`."""

    rule: str
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_gate: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    qk_l2norm: bool | Literal["q", "k"] = False

    def __str__(self) -> str:
        """The rule and the shape of the call, for error messages."""
        parts = [f"rule {self.rule!r}", f"k {list(self.k.shape)}", f"v {list(self.v.shape)}", str(self.k.dtype)]
        if self.cu_seqlens is not None:
            parts.append(f"cu_seqlens {self.cu_seqlens.tolist()}")
        parts += ["initial_state"] * (self.initial_state is not None) + ["qk_l2norm"] * bool(self.qk_l2norm)
        return ", ".join(parts)

    def tensors(self) -> dict[str, Tensor]:
        """The differentiable inputs by name."""
        named = {name: getattr(self, name) for name in ("q", "k", "v", "beta", "log_gate", "initial_state")}
        return {name: x for name, x in named.items() if x is not None}

    def double(self) -> ScanInputs:
        """The same numbers in float64."""
        return replace(self, **{name: x.double() for name, x in self.tensors().items()})  # type: ignore[arg-type]

    def call(self, backend: str, *, chunk_size: int = 64) -> tuple[Tensor, Tensor]:
        """(o, final_state) by that backend."""
        o, state = linear_attention(**vars(self), output_final_state=True, chunk_size=chunk_size, backend=backend)
        assert state is not None
        return o, state


def assert_batch_invariant(rule: str, backend: str, dtype: torch.dtype = torch.float32) -> None:
    """Assert that what runs beside a sequence does not change its bits: its outputs, final state and gradients.

    70 tokens run alone, in a batch of three, packed after 5 others, and on one thread and two; without gradients also in two
    calls, cut after 36 tokens (a multiple of 4).
    """
    made = make_inputs(rule, batch=3, length=70, key_dim=24, initial_state=True, dtype=dtype)
    weights = cotangents(made.v, made.tensors()["initial_state"])  # of o and the final state

    def whole(x: Tensor) -> Tensor:
        return x

    def row(x: Tensor) -> Tensor:
        return x[1:2]

    def part(tokens: _Part, states: _Part) -> ScanInputs:
        named = {name: (states if name == "initial_state" else tokens)(x) for name, x in made.tensors().items()}
        return replace(made, **named)  # type: ignore[arg-type]

    def attend(tokens: _Part, states: _Part, own: _Part = whole, own_state: _Part = whole, **given: Tensor) -> _Results:
        """The sequence's own part of what these parts of the inputs give."""
        inputs = replace(part(tokens, states), **given)  # type: ignore[arg-type]
        leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.tensors().items()}
        o, state = replace(inputs, **leaves).call(backend)  # type: ignore[arg-type]
        upstream = tokens(weights[0]).to(o.dtype), states(weights[1]).to(state.dtype)
        grads = torch.autograd.grad((o, state), list(leaves.values()), upstream, materialize_grads=True)
        results = dict(zip(("o", "final_state"), inputs.call(backend), strict=True))
        results |= {"o with gradients": o, "final_state with gradients": state}
        results |= {f"grad_{name}": grad for name, grad in zip(leaves, grads, strict=True)}
        return {name: (own_state if "_state" in name else own)(x) for name, x in results.items()}

    expected = attend(row, row)
    first_o, middle = part(lambda x: x[1:2, :36], row).call(backend)
    last_o, last = part(lambda x: x[1:2, 36:], lambda _: middle).call(backend)
    found = {
        "the batch": attend(whole, whole, row, row),
        "packing": attend(
            lambda x: torch.cat([x[:1, :5], x[1:2]], dim=1),
            lambda x: x[:2],
            lambda x: x[:, 5:],
            lambda x: x[1:],
            cu_seqlens=torch.tensor([0, 5, 75]),
        ),
        "a cut after 36 tokens": {"o": torch.cat([first_o, last_o], dim=1), "final_state": last},
    }
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found[f"the number of threads ({count})"] = attend(row, row)
    finally:
        torch.set_num_threads(threads)
    for what, results in found.items():
        changed = [name for name, x in results.items() if not torch.equal(x, expected[name])]
        if changed:
            raise AssertionError(f"{what} changes {', '.join(changed)} of rule {rule!r} on {backend} in {dtype}")


def make_inputs(
    rule: str = "efla",
    *,
    kind: str = "normal",
    batch: int = 2,
    length: int = 100,
    key_heads: int = 2,
    value_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    packed: Sequence[int] | None = None,
    initial_state: bool = False,
    qk_l2norm: bool | Literal["q", "k"] = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> ScanInputs:
    """Random inputs of the given kind (see ``KINDS``); ``packed`` lists the lengths of sequences packed into one row."""
    check_names("kind", [kind], KINDS)
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = None
    num_sequences = batch
    if packed is not None:
        batch, length, num_sequences = 1, sum(packed), len(packed)
        cu_seqlens = torch.tensor([0, *torch.tensor(packed).cumsum(0).tolist()], dtype=torch.int32, device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    update_rule = rules.get(rule)
    q = normal(batch, length, key_heads, key_dim)
    direction = normal(batch, length, key_heads, key_dim)
    norm = 0.4 + torch.rand(batch, length, key_heads, 1, generator=generator, dtype=torch.float64)
    k = norm * direction / direction.norm(dim=-1, keepdim=True)
    v = normal(batch, length, value_heads, value_dim)
    beta = torch.rand(batch, length, value_heads, generator=generator, dtype=torch.float64)
    log_gate = torch.nn.functional.logsigmoid(2 * normal(batch, length, value_heads))
    state = normal(num_sequences, value_heads, key_dim, value_dim) if initial_state else None
    k, beta, log_gate = _apply_kind(kind, k, beta, log_gate)

    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    scalars = [beta if update_rule.needs_beta else None, log_gate if update_rule.needs_gate else None, state]
    b, g, s = (None if x is None else x.to(device, compute_dtype(q)) for x in scalars)
    return ScanInputs(rule, q, k, v, b, g, s, cu_seqlens, qk_l2norm)


def _apply_kind(kind: str, k: Tensor, beta: Tensor, log_gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    unit = k / k.norm(dim=-1, keepdim=True)
    shuffled = torch.randperm(k.shape[1], generator=torch.Generator().manual_seed(1))
    exponents = torch.linspace(-18, 18, k.shape[1], dtype=k.dtype)[shuffled]
    keys = {
        "mixed_norms": unit * 10 ** exponents[None, :, None, None],
        "huge_keys": unit * 1e18,
        "tiny_keys": unit * 1e-18,
        "zero_keys": torch.zeros_like(k),
        "repeated_key": unit[:, :1].expand_as(unit).clone(),
        "stiff": unit * 1e2,
    }
    gates = {
        "open_gate": torch.zeros_like(log_gate),
        "nearly_open_gate": torch.full_like(log_gate, -1e-8),
        "closed_gate": log_gate.masked_fill((torch.arange(k.shape[1]) % 5 == 0)[:, None], -80),
        "strong_gate": torch.full_like(log_gate, -21),
    }
    return keys.get(kind, k), torch.ones_like(beta) if kind == "stiff" else beta, gates.get(kind, log_gate)


def run(
    inputs: ScanInputs,
    backend: str | Callable[[ScanInputs], tuple[Tensor, Tensor]],
    *,
    chunk_size: int = 64,
    gradients: bool = True,
) -> dict[str, Tensor]:
    """Everything a call gives: "o", "final_state" and, as "grad_<input>", the gradient of each input.

    ``backend`` is a name, or a differentiable function from the inputs to (o, final_state).
    The cotangents are random but the same for every backend and precision.
    """

    def call(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
        return inputs.call(backend, chunk_size=chunk_size) if isinstance(backend, str) else backend(inputs)

    if not gradients:
        o, state = call(inputs)
        return {"o": o, "final_state": state}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.tensors().items()}
    o, state = call(replace(inputs, **leaves))  # type: ignore[arg-type]
    loss = sum((x.to(torch.float64) * c).sum() for x, c in zip((o, state), cotangents(o, state), strict=True))
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    results = {"o": o.detach(), "final_state": state.detach()}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        results[f"grad_{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return results


def cotangents(*results: Tensor) -> list[Tensor]:
    """What :func:`run` multiplies results with before it differentiates their sum."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device) for x in results]


def oracle(inputs: ScanInputs, *, gradients: bool = True) -> dict[str, Tensor]:
    """The truth: the token-by-token recurrence in float64, differentiated by autograd."""
    return run(inputs.double(), "reference", gradients=gradients)


@dataclass(frozen=True)
class Expected:
    """The oracle's results for some inputs, and those of a token-by-token run in their precision."""

    inputs: ScanInputs
    truth: Mapping[str, Tensor]
    honest: Mapping[str, Tensor]


def expect(inputs: ScanInputs, *, gradients: bool = True) -> Expected:
    """Run the oracle and the reference once, for :func:`assert_matches_oracle` of any number of backends."""
    return Expected(inputs, oracle(inputs, gradients=gradients), run(inputs, "reference", gradients=gradients))


def assert_matches_oracle(
    inputs: ScanInputs | Expected,
    backend: str,
    *,
    chunk_size: int = 64,
    gradients: bool = True,
    per_token: bool = False,
) -> None:
    """Outputs, final state and all gradients of a backend are within the error budget of the float64 oracle.

    Outputs and final state are compared three times, since a backend may take another path without autograd: in a
    differentiable call, under ``torch.no_grad`` and under ``torch.inference_mode``.
    The result of :func:`expect` may be given instead of inputs; ``gradients`` is then what was given there.
    """
    expected = inputs if isinstance(inputs, Expected) else expect(inputs, gradients=gradients)
    inputs, truth = expected.inputs, expected.truth
    gradients = "grad_q" in truth
    actual = {"": run(inputs, backend, chunk_size=chunk_size, gradients=gradients)}
    with torch.no_grad():
        actual[", no_grad"] = run(inputs, backend, chunk_size=chunk_size, gradients=False)
    with torch.inference_mode():
        fresh = replace(inputs, **{name: x.clone() for name, x in inputs.tensors().items()})  # type: ignore[arg-type]
        actual[", inference_mode"] = run(fresh, backend, chunk_size=chunk_size, gradients=False)
    for mode, results in actual.items():
        try:
            assert_close(results, {name: truth[name] for name in results}, expected.honest, per_token=per_token)
        except AssertionError as error:
            case = f"backend {backend!r}, {inputs}, chunk_size {chunk_size}{mode}"
            raise AssertionError(f"{case}: {error}") from None


def assert_close(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    honest: Mapping[str, Tensor],
    *,
    per_token: bool = False,
    precision: torch.dtype | None = None,
) -> None:
    """Each tensor's error is at most twice that of ``honest``, a plain run in the same precision, plus a rounding band.

    Errors are relative to the tensor's largest entry; with ``per_token``, those of each row (last axis) to its own largest
    entry, for tokens of very different size. precision: the dtype whose rounding makes the band; default: each tensor's own.
    """
    problems = []
    for name, truth in expected.items():
        if actual[name].shape != truth.shape:
            problems.append(f"{name}: shape {list(actual[name].shape)}, expected {list(truth.shape)}")
        else:
            found = deviation(actual[name], truth, honest[name], per_token=per_token, precision=precision)
            problems += [] if found.is_within else [f"{name}: {found}"]
    if problems:
        raise AssertionError("; ".join(problems))


class Deviation(NamedTuple):
    """How far a tensor is from the truth, and how far it may be, relative to its largest entry."""

    error: float
    budget: float
    not_finite: int = 0

    @property
    def is_within(self) -> bool:
        return self.not_finite == 0 and self.error <= self.budget

    def __str__(self) -> str:
        if self.not_finite:
            return f"{self.not_finite} entries are not finite"
        return f"error {self.error:.2e}, budget {self.budget:.2e}"


def deviation(
    value: Tensor, truth: Tensor, honest: Tensor, *, per_token: bool = False, precision: torch.dtype | None = None
) -> Deviation:
    """One tensor's error and budget; see :func:`assert_close`."""
    value = value.detach()
    precision = value.dtype if precision is None else precision
    budget = 2 * _error(honest, truth, per_token) + _BAND_ULPS[precision] * torch.finfo(precision).eps
    return Deviation(_error(value, truth, per_token), budget, int((~torch.isfinite(value)).sum()))


def _error(value: Tensor, truth: Tensor, per_token: bool) -> float:
    if truth.numel() == 0:
        return 0.0
    difference, size = (value.double() - truth).abs(), truth.abs()
    scale = size.amax(-1, keepdim=True) if per_token else size.max()
    # Values below the precision's smallest normal number count as zero, which gives no scale.
    representable = scale >= torch.finfo(value.dtype).tiny
    return float((difference / torch.where(representable, scale, torch.ones_like(scale))).max())


_MATRIX_UNIT_CHUNK = 64
_LOG2_E = 1.4426950408889634  # the kernels convert the sums to base-2 logarithms, which rounds once more


def low_precision_reference(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """The recurrence token by token with the roundings that a kernel on matrix units cannot avoid.

    Such a kernel multiplies operands of the inputs' dtype and accumulates in float32; a chunked one accumulates log_decay
    over 64 tokens in float32. Use its error as the budget of GPU kernels; see :func:`assert_close`.
    Returns (o, final_state), differentiable: o [B, T, Hv, V] in v's dtype, final_state [N, Hv, K, V] in float32.

    update_t = round(write v_t) - round(exp(log_decay) erase k_t)^T round(S_{t-1})
    S_t = exp(log_decay) S_{t-1} + k_t round(update_t)^T,     o_t = scale round(S_t)^T q_t
    """
    dtype, repeats = inputs.v.dtype, inputs.v.shape[2] // inputs.k.shape[2]
    q, k, v = inputs.q.float(), inputs.k.float(), inputs.v.float()
    q = l2_normalize(q) if inputs.qk_l2norm in (True, "q") else q
    k = l2_normalize(k) if inputs.qk_l2norm in (True, "k") else k
    lam = (k.double() ** 2).sum(-1).repeat_interleave(repeats, 2)
    beta, log_gate = (None if x is None else x.double() for x in (inputs.beta, inputs.log_gate))
    rule = rules.get(inputs.rule)
    log_decay, erase, write = (x.float() for x in rule.coefficients(beta, lam, log_gate))
    q, k = (_round(x, dtype).repeat_interleave(repeats, 2).flatten(0, 1) for x in (q, k))
    v, log_decay, erase, write = (x.flatten(0, 1) for x in (v, log_decay, erase, write))
    scale = inputs.k.shape[3] ** -0.5
    outputs, finals = [], []
    borders = sequence_boundaries(inputs.v.shape[0], inputs.v.shape[1], inputs.cu_seqlens)
    for n, (start, end) in enumerate(pairwise(borders)):
        tokens = slice(start, end)
        decay = _accumulated(log_decay[tokens]).exp()[..., None]
        erased = _round(decay * erase[tokens][..., None] * k[tokens], dtype) if rule.has_erase else None
        written = _round(write[tokens][..., None] * v[tokens], dtype)
        zeros = torch.zeros(v.shape[1], k.shape[2], v.shape[2], device=v.device)
        state = zeros if inputs.initial_state is None else inputs.initial_state[n].float()
        for t in range(end - start):
            update = written[t]
            if erased is not None:
                update = update - torch.einsum("hkv,hk->hv", _round(state, dtype), erased[t])
            state = decay[t][..., None] * state + k[start + t][:, :, None] * _round(update, dtype)[:, None, :]
            outputs.append(scale * torch.einsum("hkv,hk->hv", _round(state, dtype), q[start + t]))
        finals.append(state)
    o = torch.stack(outputs) if outputs else v
    return o.view(inputs.v.shape).to(dtype), torch.stack(finals)


def _accumulated(log_decay: Tensor) -> Tensor:
    """log_decay [T, H] as differences of float32 sums over chunks of 64 tokens; gradients pass through unchanged."""
    sums = [(_LOG2_E * chunk.detach().cumsum(0)).double() for chunk in log_decay.split(_MATRIX_UNIT_CHUNK)]
    steps = [s.diff(dim=0, prepend=torch.zeros_like(s[:1])) / _LOG2_E for s in sums]
    if not steps:
        return log_decay
    return log_decay + (torch.cat(steps) - log_decay.detach().double()).float()


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def, override]
        return grad.to(ctx.dtype).to(grad.dtype), None


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to the operand dtype of a matrix unit, and its gradient likewise."""
    return x if dtype == x.dtype else _Rounding.apply(x, dtype)
