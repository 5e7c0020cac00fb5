"""Calls of the bound kernels with tensors that fit and with tensors that do not.

    python -m tests.native.kernel_calls 1000000 [EXTENSION]

The second argument is another build of the extension, one with the address sanitizer: see ``make test-sanitizers``.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

if __name__ == "__main__" and len(sys.argv) > 2:
    _spec = importlib.util.spec_from_file_location("efla.native._kernels", sys.argv[2])
    sys.modules["efla.native._kernels"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["efla.native._kernels"])

from efla.native import kernels


@dataclass
class Sizes:
    batch: int = 2
    tokens: int = 70
    key_heads: int = 2
    group: int = 1
    key_dim: int = 8
    value_dim: int = 8
    packed: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Three sequences, one of them empty."""
        return torch.tensor([0, self.tokens // 3, self.tokens // 3, self.tokens]) if self.packed else None

    @property
    def num_sequences(self) -> int:
        return 3 if self.packed else self.batch


def _norm(s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    x, gate = torch.randn(2, s.tokens, s.key_dim).to(s.dtype)
    return x, torch.randn(s.key_dim, dtype=s.wide), gate


def norm_forward(s: Sizes) -> tuple:
    x, weight, gate = _norm(s)
    return x, weight, gate, torch.empty_like(x), 1 / s.key_dim, 1e-6, 1


def norm_backward(s: Sizes) -> tuple:
    x, weight, gate = _norm(s)
    parts = torch.empty(kernels.norm_parts(s.tokens), s.key_dim, dtype=s.wide)
    d_x, d_gate = torch.empty_like(x), torch.empty_like(x)
    return x, weight, gate, torch.randn_like(x), d_x, d_gate, parts, 1 / s.key_dim, 1e-6, 1


def _conv(s: Sizes, width: int = 4) -> tuple[Tensor | None, ...]:
    x = torch.randn(s.batch, s.tokens, s.value_dim).to(s.dtype)
    past = torch.randn(s.num_sequences, width - 1, s.value_dim, dtype=s.wide)
    weight, bias = torch.randn(width, s.value_dim, dtype=s.wide), torch.randn(s.value_dim, dtype=s.wide)
    return x, weight, bias, past, s.cu_seqlens


def conv_forward(s: Sizes) -> tuple:
    x, *rest = _conv(s)
    return x, *rest, torch.empty_like(x), True, 1


def conv_backward(s: Sizes) -> tuple:
    x, weight, bias, past, cu_seqlens = _conv(s)
    num_parts = kernels.conv_parts(cu_seqlens, s.num_sequences, s.tokens)
    parts = torch.empty(num_parts, weight.shape[0] + 1, s.value_dim, dtype=s.wide)
    gradients = torch.randn_like(x), torch.empty_like(x), torch.zeros_like(past), parts
    return x, weight, bias, past, cu_seqlens, *gradients, True, 1


def gate_forward(s: Sizes) -> tuple:
    gate = torch.randn(s.tokens * s.key_dim).to(s.dtype)
    return gate, gate.clone(), torch.empty_like(gate), 1


def gate_backward(s: Sizes) -> tuple:
    gate = torch.randn(s.tokens * s.key_dim).to(s.dtype)
    return gate, gate.clone(), gate.clone(), torch.empty_like(gate), torch.empty_like(gate), 1


def _scan(s: Sizes) -> tuple[Tensor | None, ...]:
    heads = s.key_heads * s.group
    q, k = (torch.randn(s.batch, s.tokens, s.key_heads, s.key_dim).to(s.dtype) for _ in range(2))
    v = torch.randn(s.batch, s.tokens, heads, s.value_dim).to(s.dtype)
    log_gate, beta = (torch.rand(s.batch, s.tokens, heads, dtype=s.wide) for _ in range(2))
    state = torch.randn(s.num_sequences, heads, s.key_dim, s.value_dim, dtype=s.wide)
    return q, k, v, None, None, None, -log_gate, beta, state, s.cu_seqlens


def _boundary_states(s: Sizes) -> Tensor:
    heads = s.key_heads * s.group
    count = kernels.boundary_count(s.cu_seqlens, s.num_sequences, s.tokens, heads, s.key_dim, s.value_dim)
    return torch.zeros(count, dtype=s.wide)


def forward(s: Sizes) -> tuple:
    inputs = _scan(s)
    rule = kernels.rule_codes["gated_delta"]
    results = torch.empty_like(inputs[2]), torch.empty_like(inputs[8]), _boundary_states(s)
    return *inputs, *results, rule, "", 0.5, False, True, 1


def backward(s: Sizes) -> tuple:
    q, k, v, _, _, _, log_gate, beta, state, _ = inputs = _scan(s)
    given = _boundary_states(s), torch.randn_like(v), torch.randn_like(state)
    d_q, d_k, d_v, d_log_gate, d_beta = (torch.empty_like(x) for x in (q, k, v, log_gate, beta))
    gradients = d_q, d_k, d_v, None, None, None, d_log_gate, d_beta
    rule = kernels.rule_codes["gated_delta"]
    return *inputs, *given, *gradients, torch.empty_like(state), rule, "qk", 0.5, 1


def mixer_step(s: Sizes, width: int = 4) -> tuple:
    heads = s.key_heads * s.group
    keys, values = s.key_heads * s.key_dim, heads * s.value_dim
    q, k, v, b, a, g = (torch.randn(s.batch, 1, n).to(s.dtype) for n in (keys, keys, values, heads, heads, values))
    weights = [torch.randn(n, 1, width).to(s.dtype) for n in (keys, keys, values)]
    conv_state = torch.randn(s.batch, 2 * keys + values, width - 1).to(s.dtype)
    memory = torch.randn(s.batch, heads, s.key_dim, s.value_dim, dtype=s.wide)
    parameters = [torch.randn(n).to(s.dtype) for n in (heads, heads, s.value_dim)]
    settings = kernels.rule_codes["gated_efla"], "q", 0.5, 1.0, 1e-6, 1
    return q, k, v, b, a, g, *weights, conv_state, memory, *parameters, torch.empty_like(v), *settings


def block_step(s: Sizes, width: int = 6, inner: int = 5) -> tuple:
    _, _, v, _, _, _, *rest = mixer_step(s)
    tensors, settings = rest[:8], rest[9:-1]
    heads, keys, values = s.key_heads * s.group, s.key_heads * s.key_dim, v.shape[2]
    x, gain, mlp_gain = torch.randn(s.batch, 1, width).to(s.dtype), *torch.randn(2, width, dtype=s.wide)
    maps = [torch.randn(n, width).to(s.dtype) for n in (keys, keys, values, heads, heads, values)]
    out, gate, up, down = (
        torch.randn(n).to(s.dtype) for n in ((width, values), (inner, width), (inner, width), (width, inner))
    )
    y = torch.empty_like(x)
    return x, gain, *maps, out, mlp_gain, gate, up, down, *tensors, y, *settings, 1e-6, 1e-6, 1


def mamba2_step(s: Sizes, width: int = 4) -> tuple:
    dtype, heads = s.wide, s.key_heads * s.group
    keys, values = s.key_heads * s.key_dim, heads * s.value_dim
    channels = values + 2 * keys
    projected = torch.randn(s.batch, 1, values + channels + heads, dtype=dtype)
    conv = torch.randn(channels, 1, width, dtype=dtype), torch.randn(channels, dtype=dtype)
    states = torch.randn(s.batch, channels, width - 1, dtype=dtype), mixer_step(s)[10].to(dtype)
    parameters = [torch.randn(n, dtype=dtype) for n in (heads, heads, heads, values)]
    return projected, *conv, *states, *parameters, projected.new_empty(s.batch, 1, values), 1e-6, 1


def products(s: Sizes) -> tuple:
    columns = s.value_dim, s.key_heads, 3
    x, weights = torch.randn(s.batch, s.key_dim).to(s.dtype), [torch.randn(n, s.key_dim).to(s.dtype) for n in columns]
    if s.dtype == torch.float32:  # also with smaller weights; int8 ones have the bytes of a float32 scale in each row
        weights[1:] = functional.pad(weights[1], (0, 4)).to(torch.int8), weights[2].half()
    return x, weights, [x.new_empty(s.batch, n) for n in columns], False, 1


KERNELS = {
    f.__name__: f
    for f in (
        norm_forward, norm_backward, conv_forward, conv_backward, gate_forward, gate_backward, forward, backward,
        mixer_step, mamba2_step, block_step, products,
    )
}  # fmt: skip
Place = tuple[int, ...]


def places_of(arguments: tuple) -> dict[Place, Tensor]:
    """Where the tensors of a call are: (argument,), or (argument, index) in a list."""
    found = {}
    for i, x in enumerate(arguments):
        if isinstance(x, Tensor):
            found[i,] = x
        elif isinstance(x, list):
            found |= {(i, j): y for j, y in enumerate(x)}
    return found


def replaced(arguments: tuple, place: Place, value: object) -> tuple:
    """The arguments with one tensor replaced."""
    i, *index = place
    if index:
        value = [value if j == index[0] else x for j, x in enumerate(arguments[i])]
    return *arguments[:i], value, *arguments[i + 1 :]


def misfits(x: Tensor, *, any_strides: bool = False) -> Iterator[object]:
    """What is not what x stands for: other sizes, dimensions, types, memory."""
    for axis in range(x.dim()):
        if x.shape[axis]:
            yield x.narrow(axis, 0, x.shape[axis] - 1).contiguous()
            yield torch.cat([x, x.narrow(axis, 0, 1)], axis)
    yield x[None]
    if x.dim() > 1:
        yield x.flatten()
    yield x.new_empty(1, 0)
    yield x.double() if x.dtype != torch.float64 else x.float()
    yield x.to(torch.complex64)
    yield x.to("meta")
    yield "a string"
    if not x.numel():
        return
    if x.is_floating_point():
        yield torch._neg_view(x)
    if not any_strides and x.shape[-1] > 1:
        yield torch.stack([x, x], -1)[..., 0]  # rows that are not contiguous
    gone = torch.cat([x, x])
    second = gone[x.shape[0] :]  # not at address 0
    gone.untyped_storage().resize_(0)
    yield second


def random_calls(count: int, seed: int) -> int:
    """Call kernels on random sizes, zero among them, with up to two arguments swapped or misfitting; how many were computed."""
    draw = random.Random(seed)
    computed = 0
    for call in range(count):
        if call % 50 == 0:  # making tensors costs more than the calls
            name = draw.choice(list(KERNELS))
            fitting = KERNELS[name](_random_sizes(draw))
            places = places_of(fitting)
            wrong = {place: [None, *misfits(x), *places.values()] for place, x in places.items()}
        arguments = fitting
        changes = draw.choice([0, 1, 1, 2])
        for place in draw.sample(list(places), changes):
            arguments = replaced(arguments, place, draw.choice(wrong[place]))
        try:
            getattr(kernels, name)(*arguments)
            computed += 1
        except (ValueError, TypeError):
            if not changes:
                raise
    return computed


def _random_sizes(draw: random.Random) -> Sizes:
    packed = draw.random() < 0.3
    return Sizes(
        batch=1 if packed else draw.randint(0, 3),
        tokens=draw.choice([0, 1, 2, 5, 63, 64, 65, 130]),
        key_heads=draw.randint(1, 3),
        group=draw.randint(1, 2),
        key_dim=draw.choice([1, 3, 8, 17, 40]),
        value_dim=draw.choice([1, 3, 8, 33]),
        packed=packed,
        dtype=draw.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    )


if __name__ == "__main__":
    total = int(sys.argv[1])
    torch.set_num_threads(1)
    done = 0
    for first in range(0, total, 10_000):
        done += random_calls(min(10_000, total - first), seed=first)
        print(f"{min(first + 10_000, total):,} calls, {done:,} computed, the others refused", flush=True)
