"""transformers' Qwen3.5 as it is, with ``accelerate_cpu``, and its own matrix products, which bound both."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from efla import EflaConfig
from efla.bench import Suite, decode_call, prefill_call, random_tokens, read, training_call
from efla.integrations.transformers import accelerate_cpu
from efla.runs.timing import Measurement, compare

TRANSFORMERS, ACCELERATED, FLOOR = "transformers Qwen3.5", "the same, accelerate_cpu", "its products"
LENGTH, VOCABULARY, HEAD_DIM = 2048, 1024, 128
TOKENS = 16  # decoded in a call, so that switching accelerate_cpu on and off does not count


def qwen_model(config: EflaConfig, layers: list[str] | None = None) -> Any:
    """Qwen3.5's text decoder at the size of our config, randomly initialised.

    layers: "linear" (the gated delta rule, default in every layer) or "full" (softmax attention).
    """
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    counts = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
    widths = ("head_dim", "linear_key_head_dim", "linear_value_head_dim")
    sizes = sizes_of(config) | dict.fromkeys(counts, config.num_heads) | dict.fromkeys(widths, config.head_dim)
    types = [f"{kind}_attention" for kind in layers or ["linear"] * config.num_hidden_layers]
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, layer_types=types, tie_word_embeddings=False))


def sizes_of(config: EflaConfig) -> dict[str, Any]:
    """What a config of transformers takes from ours."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
    return {**{name: getattr(config, name) for name in names}, "pad_token_id": None}


def suite(width: int, layers: int, dtype: torch.dtype) -> Suite:
    """Prefill and a training step at 2,048 tokens, and decoding, each beside the products of the same shapes.

    All layers have the gated delta rule, except that every fourth has softmax attention in decoding: transformers
    refuses a cache of linear layers alone.
    """

    def measure(rounds: int) -> Iterator[list[Measurement]]:
        config = EflaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_heads=width // HEAD_DIM,
        )  # fmt: skip
        size = f"Qwen3.5 {layers} layers of {width}, {str(dtype).removeprefix('torch.')}"

        def compared(
            work: str, call: Callable[[], object], floor: Callable[[], object], items: int
        ) -> list[Measurement]:
            calls = {TRANSFORMERS: call, ACCELERATED: accelerated(call), FLOOR: floor}
            return compare(f"{work}, {size}", calls, rounds=rounds, items=items)

        tokens = random_tokens(VOCABULARY, 1, LENGTH)
        hybrid = qwen_model(config, [*["linear"] * 3, "full"] * (layers // 4)).to(dtype)
        decoding = decode_call(hybrid, read(hybrid.eval(), tokens[:, :64]), times=TOKENS)
        yield compared(f"decode {TOKENS}", decoding, products(hybrid, 1, 1, TOKENS), TOKENS)
        del hybrid
        model = qwen_model(config).to(dtype)
        yield compared(f"prefill {LENGTH}", prefill_call(model, tokens), products(model, LENGTH, 1), LENGTH)
        step = training_call(model, tokens)
        yield compared(f"training step {LENGTH}", step, products(model, LENGTH, LENGTH, backward=True), LENGTH)

    return measure


def products(model: Any, rows: int, head_rows: int, times: int = 1, *, backward: bool = False) -> Callable[[], object]:
    """All linear maps of the model on that many rows, and nothing else; backward: two more products for each."""
    head = model.get_output_embeddings()
    maps = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    sizes = {m: (head_rows if m is head else rows, m.in_features) for m in maps}
    inputs = {size: torch.randn(size, dtype=head.weight.dtype) for size in set(sizes.values())}
    work = [(inputs[size], m.weight.detach()) for m, size in sizes.items()]

    def call() -> None:
        for x, weight in work * times:
            y = functional.linear(x, weight)
            if backward:
                y @ weight
                y.T @ x

    return call


def accelerated(call: Callable[[], object]) -> Callable[[], object]:
    """The call with transformers' models on efla's kernels."""

    def run() -> object:
        with accelerate_cpu():
            return call()

    return run


SUITES: dict[str, Suite] = {
    "qwen": suite(512, 4, torch.float32),
    "qwen-bfloat16": suite(512, 4, torch.bfloat16),
    "qwen-wide": suite(1024, 24, torch.float32),  # minutes a round
    "qwen-wide-bfloat16": suite(1024, 24, torch.bfloat16),
}
