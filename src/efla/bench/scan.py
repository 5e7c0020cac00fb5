"""The scan compared with transformers' functions, causal softmax attention and the machine's sgemm.

Useful work is 6 K V flops per token and head in the forward pass (recall, write, read) and 24 K V with the backward pass,
for every implementation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import efla
from efla.bench import Suite, sgemm
from efla.native import kernels
from efla.runs.provenance import PeakMemory
from efla.runs.timing import Calls, Measurement, compare
from efla.scans.backends import native

SGEMM_SIZE = 2048
FORWARD_FLOPS = 6
TRAINING_FLOPS = 24

Work = Literal["forward", "training", "decoding"]


@dataclass(frozen=True)
class Size:
    """Sizes of one call, K = V = ``width``."""

    batch: int
    length: int
    heads: int
    width: int

    def __str__(self) -> str:
        return f"B{self.batch} T{self.length} H{self.heads} D{self.width}"

    def flops(self, per_state_entry: int) -> float:
        return float(per_state_entry) * self.batch * self.length * self.heads * self.width**2


HEADLINE = [Size(1, 4096, 8, 64), Size(1, 4096, 8, 128), Size(128, 784, 1, 64)]
LENGTHS = [512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 262_144]
SHORT_LENGTHS = [64, 128, 256, 512]
GROWTH = {
    "tokens": [Size(1, 1024 * 4**n, 8, 64) for n in range(5)],
    "sequences": [Size(4**n, 1024, 8, 64) for n in range(4)],
    "heads": [Size(1, 4096, 2 * 4**n, 64) for n in range(4)],
}
"""What grows -> the sizes that are compared."""
KINDS: dict[str, tuple[Work, int]] = {
    "forward": ("forward", FORWARD_FLOPS),
    "forward+backward": ("training", TRAINING_FLOPS),
}
SAMPLE_SECONDS = 0.03
DECODE_BATCHES = [1, 4, 16, 64]
CALLS = 256  # in a sample of the overhead
# Above this length the quadratic and the plain-torch contenders take minutes and show nothing new.
LONGEST_PEER = 16_384
YARDSTICK_LENGTH = 4096
YARDSTICK = f"native at T{YARDSTICK_LENGTH}"
ALONE = "native, kernels alone"


def headline(rounds: int) -> Iterator[list[Measurement]]:
    """Forward, and forward with backward, of the gated delta rule, at three sizes."""
    for size in HEADLINE:
        calls = contender_calls(size, "forward")
        if size.batch == 1:
            calls["softmax attention"] = softmax_call(size)
        calls["native bfloat16"] = attention_call(size, "gated_delta", dtype=torch.bfloat16)
        calls[ALONE] = kernel_call(size, "forward")
        yield _against_sgemm(f"forward {size}", calls, rounds, size.flops(FORWARD_FLOPS))
        calls = {**contender_calls(size, "training"), ALONE: kernel_call(size, "training")}
        yield _against_sgemm(f"forward+backward {size}", calls, rounds, size.flops(TRAINING_FLOPS))


def rules(rounds: int) -> Iterator[list[Measurement]]:
    """Every rule on ``native``: the cost of the exact flow relative to the Euler step."""
    for size in HEADLINE[:2]:
        forward = {name: attention_call(size, name) for name in efla.rules.names()}
        yield _against_sgemm(f"rules, forward {size}", forward, rounds, size.flops(FORWARD_FLOPS))
        names = ("delta", "efla", "gated_delta", "gated_efla")
        training = {name: attention_call(size, name, work="training") for name in names}
        yield _against_sgemm(f"rules, forward+backward {size}", training, rounds, size.flops(TRAINING_FLOPS))


def lengths(rounds: int) -> Iterator[list[Measurement]]:
    """Forward pass at increasing context lengths."""
    for width in (64, 128):
        for length in LENGTHS:
            size = Size(1, length, 8, width)
            if length <= LONGEST_PEER:
                calls = {**contender_calls(size, "forward"), "softmax attention": softmax_call(size)}
            else:
                calls = {"native": attention_call(size, "gated_delta")}
            flops_of = {}
            if length > YARDSTICK_LENGTH:
                # The same rounds also time a short context, so that costs per token are compared within them.
                yardstick = Size(1, YARDSTICK_LENGTH, 8, width)
                calls[YARDSTICK] = attention_call(yardstick, "gated_delta")
                flops_of = {YARDSTICK: yardstick.flops(FORWARD_FLOPS)}
            yield compare(
                f"length, forward {size}", calls, rounds=rounds, useful_flops=size.flops(FORWARD_FLOPS), flops_of=flops_of,
                sample_seconds=SAMPLE_SECONDS,
            )  # fmt: skip


def decode(rounds: int) -> Iterator[list[Measurement]]:
    """One token with a carried state: the whole call as a model makes it.

    The lower bound is one pass over the state with torch's in-place product: every token reads and writes all of it.
    """
    for width in (64, 128):
        for batch in DECODE_BATCHES:
            size = Size(batch, 1, 8, width)
            calls: dict[str, Callable[[], object]] = {
                "native": attention_call(size, "gated_delta", work="decoding"),
                "native efla": attention_call(size, "efla", work="decoding"),
                "transformers": transformers_call(size, "decoding"),
                "one pass over the state": partial(torch.ones(batch, 8, width, width).mul_, 0.999),
            }
            repeats = 64 if batch <= 16 else 16
            flops = size.flops(FORWARD_FLOPS)
            yield compare(f"decode {size}", calls, rounds=3 * rounds, repeats=repeats, useful_flops=flops)


def overhead(rounds: int) -> Iterator[list[Measurement]]:
    """A decoded token and a training call on one head of width 16, where nearly all is overhead, beside the bound C++ functions.

    Those of training write to tensors that exist. "autograd alone" differentiates a function of the same tensors that
    computes nothing.
    """
    token, tokens = Size(1, 1, 1, 16), Size(1, 16, 1, 16)
    q, k, v, beta, _ = made = inputs(tokens, "efla")
    o, state, saved = torch.empty_like(v), torch.zeros(1, 1, 16, 16), torch.empty(0)
    given = (q, k, v, None, None, None, None, beta, None, None)
    grads = [None if x is None else torch.empty_like(x) for x in given[:9]]
    settings, threads = (native.rule_code(efla.rules.get("efla")), "", 0.25), torch.get_num_threads()
    leaves = [x.clone().requires_grad_() for x in made.present()]

    def bound() -> None:
        kernels.forward(*given, o, state, saved, *settings, False, True, threads)
        kernels.backward(*given, saved, o, None, *grads, *settings, threads)

    decoding: dict[str, Callable[[], object]] = {
        "native": attention_call(token, "efla", work="decoding"),
        "bound function": partial(
            native.decode, *inputs(token, "efla"), "efla", False, None, state.clone(), True, True, True
        ),
    }
    training: dict[str, Callable[[], object]] = {
        "native": attention_call(tokens, "efla", work="training"),
        "bound functions": bound,
        "autograd alone": _with_gradients(lambda: (_Nothing.apply(*leaves), None), leaves),  # type: ignore[no-untyped-call]
    }
    for work, calls in ((f"decode {token}", decoding), (f"forward+backward {tokens}", training)):
        yield compare(f"overhead, {work}", calls, rounds=3 * rounds, repeats=CALLS)


class _Nothing(torch.autograd.Function):
    """Saves its four inputs, returns an empty output and empty gradients."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(tensors[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def short(rounds: int) -> Iterator[list[Measurement]]:
    """One head of 128 and a short sequence, on one thread and on all: how much of the work is shared."""
    for name, (work, flops) in KINDS.items():
        for length in SHORT_LENGTHS:
            size = Size(1, length, 1, 128)
            call = attention_call(size, "gated_delta", work=work)
            yield compare(
                f"short, {name} {size}", {"native": call, "native, 1 thread": partial(_on_one_thread, call)},
                rounds=3 * rounds, useful_flops=size.flops(flops), sample_seconds=SAMPLE_SECONDS,
            )  # fmt: skip


def growth(rounds: int) -> Iterator[list[Measurement]]:
    """Time and memory as the number of tokens, sequences or heads grows; all sizes of one axis in turn."""
    for name, (work, flops) in KINDS.items():
        for axis, sizes in GROWTH.items():
            calls = {str(size): attention_call(size, "gated_delta", work=work) for size in sizes}
            work_of = {str(size): size.flops(flops) for size in sizes}
            title = f"growth of {axis}, {name}"
            found = compare(title, calls, rounds=rounds, flops_of=work_of, sample_seconds=SAMPLE_SECONDS)
            yield [replace(m, memory=_peak_memory(calls[m.contender])) for m in found]


@torch.no_grad()
def _peak_memory(call: Callable[[], object]) -> float | None:
    memory = PeakMemory("cpu")
    call()
    return memory.growth()


def _on_one_thread(call: Callable[[], object]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        call()
    finally:
        torch.set_num_threads(threads)


SUITES: dict[str, Suite] = {f.__name__: f for f in (headline, rules, lengths, decode, overhead, short, growth)}


class Inputs(NamedTuple):
    """The tensors of one call, in the order of :func:`efla.linear_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_gate: Tensor | None

    def present(self) -> list[Tensor]:
        return [x for x in self if x is not None]


def inputs(
    size: Size, rule: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu", grad: bool = False
) -> Inputs:
    """Arguments of one call with the statistics of a trained layer: keys of unit norm, gates near one."""
    generator = torch.Generator().manual_seed(0)
    shape = (size.batch, size.length, size.heads, size.width)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    beta, log_gate = (torch.rand(shape[:3], generator=generator) for _ in range(2))
    update_rule = efla.rules.get(rule)
    q, k, v = (x.to(device, dtype) for x in (q, torch.nn.functional.normalize(k, dim=-1), v))
    b = beta.to(device) if update_rule.needs_beta else None
    made = Inputs(q, k, v, b, (-0.1 * log_gate).to(device) if update_rule.needs_gate else None)
    for x in made.present():
        x.requires_grad_(grad)
    return made


def attention_call(
    size: Size,
    rule: str,
    backend: str = "native",
    *,
    work: Work = "forward",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Callable[[], object]:
    """A call of :func:`efla.linear_attention`; training computes all gradients, decoding carries a state."""
    tensors = inputs(size, rule, dtype=dtype, device=device, grad=work == "training")
    options: dict[str, Any] = {}
    if work == "decoding":
        state = torch.zeros(size.batch, size.heads, size.width, size.width, device=device)
        options = {"initial_state": state, "output_final_state": True, "inplace_state": True}

    def call() -> Any:
        return efla.linear_attention(*tensors, rule=rule, backend=backend, **options)

    return _with_gradients(call, tensors.present()) if work == "training" else call


def kernel_call(size: Size, work: Work) -> Callable[[], object]:
    """The kernels of the gated delta rule without autograd, on outputs that are allocated once."""
    q, k, v, beta, log_gate = inputs(size, "gated_delta")
    o, final_state = torch.empty_like(v), torch.empty(size.batch, size.heads, size.width, size.width)
    count = kernels.boundary_count(None, size.batch, size.length, size.heads, size.width, size.width)
    saved = torch.empty(count) if work == "training" else None
    arguments = (q, k, v, None, None, None, log_gate, beta, None, None)
    grads = [None if x is None else torch.empty_like(x) for x in arguments[:9]]
    settings = (kernels.rule_codes["gated_delta"], "", size.width**-0.5)
    threads = torch.get_num_threads()

    def call() -> None:
        kernels.forward(*arguments, o, final_state, saved, *settings, False, False, threads)
        if work == "training":
            kernels.backward(*arguments, saved, v, None, *grads, *settings, threads)

    return call


def transformers_call(size: Size, work: Work) -> Callable[[], object]:
    """The same work by the gated delta rule of transformers' Qwen3-Next."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    made = inputs(size, "gated_delta", grad=work == "training")
    assert made.beta is not None and made.log_gate is not None
    tensors = [made.q, made.k, made.v, made.log_gate, made.beta]
    function, options = qwen.torch_chunk_gated_delta_rule, {}
    if work == "decoding":
        state = torch.zeros(size.batch, size.heads, size.width, size.width)
        function, options = qwen.torch_recurrent_gated_delta_rule, {"initial_state": state, "output_final_state": True}

    def call() -> Any:
        return function(*tensors, **options)

    return _with_gradients(call, tensors) if work == "training" else call


def contender_calls(size: Size, work: Work) -> dict[str, Callable[[], object]]:
    """The gated delta rule on our two CPU backends and in transformers."""
    return {
        "native": attention_call(size, "gated_delta", work=work),
        "chunked": attention_call(size, "gated_delta", "chunked", work=work),
        "transformers": transformers_call(size, work),
    }


def softmax_call(size: Size) -> Callable[[], object]:
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs(size, "linear").present())
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _with_gradients(forward: Callable[[], Any], leaves: Sequence[Tensor]) -> Callable[[], object]:
    @torch.enable_grad()
    def call() -> object:
        o, _ = forward()
        return torch.autograd.grad(o, leaves, grad_outputs=torch.ones_like(o))

    return call


def _against_sgemm(work: str, calls: Calls, rounds: int, useful_flops: float) -> list[Measurement]:
    product, flops_of = sgemm(SGEMM_SIZE)
    return compare(
        work, {**calls, **product}, rounds=rounds, useful_flops=useful_flops, flops_of=flops_of,
        sample_seconds=SAMPLE_SECONDS,
    )  # fmt: skip
