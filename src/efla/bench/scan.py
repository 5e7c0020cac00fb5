"""The scan against what people have today: transformers' functions, causal softmax attention, and the machine's sgemm.

Useful work is counted as 6 K V flops a token and head forwards (recall, write, read) and 24 K V with the backward pass,
whatever an implementation really does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import efla
from efla.runs.timing import Contender, Measurement, compare

SGEMM_SIZE = 2048
FORWARD_FLOPS = 6
TRAINING_FLOPS = 24


@dataclass(frozen=True)
class Size:
    batch: int
    length: int
    heads: int
    width: int

    def __str__(self) -> str:
        return f"B{self.batch} T{self.length} H{self.heads} D{self.width}"

    def flops(self, per_state_entry: int) -> float:
        return float(per_state_entry) * self.batch * self.length * self.heads * self.width**2


HEADLINE = [Size(1, 4096, 8, 64), Size(1, 4096, 8, 128), Size(128, 784, 1, 64)]
LENGTHS = [512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536]
SAMPLE_SECONDS = 0.03
DECODE_BATCHES = [1, 4, 16, 64]
# Beyond this length the quadratic and the plain-torch contenders take minutes and say nothing new.
LONGEST_PEER = 16_384
YARDSTICK_LENGTH = 4096
YARDSTICK = f"native at T{YARDSTICK_LENGTH}"


def headline(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """Forward, and forward with backward, of the gated delta rule, at three sizes."""
    for size in HEADLINE:
        calls = forward_calls(size, softmax=size.batch == 1)
        calls |= {"native bfloat16": attention_call(size, "gated_delta", "native", dtype=torch.bfloat16)}
        yield _against_sgemm(f"forward {size}", calls, threads, rounds, size.flops(FORWARD_FLOPS))
        yield _against_sgemm(
            f"forward+backward {size}", training_calls(size), threads, rounds, size.flops(TRAINING_FLOPS)
        )


def rules(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """Every rule on ``native``: what the exact flow costs over the Euler step."""
    for size in HEADLINE[:2]:
        forward = {name: attention_call(size, name, "native") for name in efla.rules.names()}
        yield _against_sgemm(f"rules, forward {size}", forward, threads, rounds, size.flops(FORWARD_FLOPS))
        training = {
            name: training_call(size, name, "native") for name in ("delta", "efla", "gated_delta", "gated_efla")
        }
        yield _against_sgemm(f"rules, forward+backward {size}", training, threads, rounds, size.flops(TRAINING_FLOPS))


def lengths(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """Forward pass against the length of the context."""
    for width in (64, 128):
        for length in LENGTHS:
            size = Size(1, length, 8, width)
            calls = forward_calls(size) if length <= LONGEST_PEER else {"native": native_call(size)}
            flops_of = {}
            if length > YARDSTICK_LENGTH:
                # The same rounds time a short context too: cost per token is compared within them, not between phases.
                yardstick = Size(1, YARDSTICK_LENGTH, 8, width)
                calls[YARDSTICK] = native_call(yardstick)
                flops_of = {YARDSTICK: yardstick.flops(FORWARD_FLOPS)}
            yield compare(
                f"length, forward {size}",
                [Contender(name, call) for name, call in calls.items()],
                threads=threads,
                rounds=rounds,
                useful_flops=size.flops(FORWARD_FLOPS),
                flops_of=flops_of,
                sample_seconds=SAMPLE_SECONDS,
            )


def decode(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """Token after token, the state carried over: the whole call as a model makes it.

    One pass over the state, by torch's in-place product, is the limit: every token must read and write all of it.
    """
    for width in (64, 128):
        for batch in DECODE_BATCHES:
            size = Size(batch, 1, 8, width)
            repeats = 64 if batch <= 16 else 16
            calls = {
                "native": decode_call(size, "gated_delta"),
                "native efla": decode_call(size, "efla"),
                "transformers": transformers_decode_call(size),
                "one pass over the state": state_pass_call(size),
            }
            yield compare(
                f"decode {size}",
                [Contender(name, call, repeats) for name, call in calls.items()],
                threads=threads,
                rounds=3 * rounds,
                useful_flops=size.flops(FORWARD_FLOPS),
            )


SUITES: dict[str, Callable[[int, int], Iterator[list[Measurement]]]] = {
    "headline": headline,
    "rules": rules,
    "lengths": lengths,
    "decode": decode,
}


class Inputs(NamedTuple):
    """The tensors of one call, in the order of :func:`efla.linear_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_gate: Tensor | None

    def present(self) -> list[Tensor]:
        return [x for x in self if x is not None]


def inputs(size: Size, rule: str, *, dtype: torch.dtype = torch.float32, grad: bool = False) -> Inputs:
    """Arguments of one call, as a trained layer would make them: keys of norm near one, gates near one."""
    generator = torch.Generator().manual_seed(0)
    shape = (size.batch, size.length, size.heads, size.width)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = normal(), torch.nn.functional.normalize(normal(), dim=-1), normal()
    beta, log_gate = (torch.rand(shape[:3], generator=generator) for _ in range(2))
    update_rule = efla.rules.get(rule)
    made = Inputs(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        beta if update_rule.needs_beta else None,
        -0.1 * log_gate if update_rule.needs_gate else None,
    )
    for x in made.present():
        x.requires_grad_(grad)
    return made


def attention_call(size: Size, rule: str, backend: str, *, dtype: torch.dtype = torch.float32) -> Callable[[], object]:
    tensors = inputs(size, rule, dtype=dtype)

    def call() -> object:
        return efla.linear_attention(*tensors, rule=rule, backend=backend)

    return call


def native_call(size: Size) -> Callable[[], object]:
    return attention_call(size, "gated_delta", "native")


def training_call(size: Size, rule: str, backend: str) -> Callable[[], object]:
    tensors = inputs(size, rule, grad=True)

    @torch.enable_grad()
    def call() -> object:
        o, _ = efla.linear_attention(*tensors, rule=rule, backend=backend)
        return torch.autograd.grad(o, tensors.present(), grad_outputs=torch.ones_like(o))

    return call


def decode_call(size: Size, rule: str) -> Callable[[], object]:
    tensors = inputs(size, rule)
    state = torch.zeros(size.batch, size.heads, size.width, size.width)

    def call() -> object:
        return efla.linear_attention(
            *tensors, rule=rule, initial_state=state, output_final_state=True, inplace_state=True, backend="native"
        )

    return call


def state_pass_call(size: Size) -> Callable[[], object]:
    state = torch.ones(size.batch, size.heads, size.width, size.width)
    return lambda: state.mul_(0.999)


def transformers_forward_call(size: Size) -> Callable[[], object]:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    tensors = _in_transformers_order(inputs(size, "gated_delta"))

    def call() -> object:
        return torch_chunk_gated_delta_rule(*tensors)

    return call


def transformers_training_call(size: Size) -> Callable[[], object]:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    tensors = _in_transformers_order(inputs(size, "gated_delta", grad=True))

    @torch.enable_grad()
    def call() -> object:
        o, _ = torch_chunk_gated_delta_rule(*tensors)
        return torch.autograd.grad(o, tensors, grad_outputs=torch.ones_like(o))

    return call


def transformers_decode_call(size: Size) -> Callable[[], object]:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    tensors = _in_transformers_order(inputs(size, "gated_delta"))
    state = torch.zeros(size.batch, size.heads, size.width, size.width)

    def call() -> object:
        return torch_recurrent_gated_delta_rule(*tensors, initial_state=state, output_final_state=True)

    return call


def softmax_call(size: Size) -> Callable[[], object]:
    tensors = inputs(size, "linear")
    q, k, v = (x.transpose(1, 2).contiguous() for x in (tensors.q, tensors.k, tensors.v))

    def call() -> object:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return call


def forward_calls(size: Size, *, softmax: bool = True) -> dict[str, Callable[[], object]]:
    calls = {
        "native": native_call(size),
        "chunked": attention_call(size, "gated_delta", "chunked"),
        "transformers": transformers_forward_call(size),
    }
    return calls | ({"softmax attention": softmax_call(size)} if softmax else {})


def training_calls(size: Size) -> dict[str, Callable[[], object]]:
    return {
        "native": training_call(size, "gated_delta", "native"),
        "chunked": training_call(size, "gated_delta", "chunked"),
        "transformers": transformers_training_call(size),
    }


def _in_transformers_order(tensors: Inputs) -> list[Tensor]:
    assert tensors.beta is not None and tensors.log_gate is not None
    return [tensors.q, tensors.k, tensors.v, tensors.log_gate, tensors.beta]


def _against_sgemm(
    work: str, calls: dict[str, Callable[[], object]], threads: int, rounds: int, useful_flops: float
) -> list[Measurement]:
    left, right = torch.randn(2, SGEMM_SIZE, SGEMM_SIZE)
    contenders = [Contender(name, call) for name, call in calls.items()]
    contenders.append(Contender("sgemm", lambda: left @ right))
    flops_of = {"sgemm": 2.0 * SGEMM_SIZE**3}
    return compare(
        work, contenders, threads=threads, rounds=rounds, useful_flops=useful_flops, flops_of=flops_of,
        sample_seconds=SAMPLE_SECONDS,
    )  # fmt: skip
