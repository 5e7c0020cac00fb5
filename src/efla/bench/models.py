"""Whole models against transformers' own of the same size, and the cost of a token against the length of the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import efla
from efla.integrations.transformers import accelerate_cpu
from efla.models.accounting import state_bytes
from efla.runs.timing import Contender, Measurement, compare

HIDDEN, LAYERS, HEADS, WIDTH, MLP, VOCABULARY = 512, 4, 4, 128, 1536, 1024
PREFILL_LENGTH = 2048
CONTEXTS = (1_000, 100_000)
PREFILL_CHUNK = 4096
TRANSFORMERS = "transformers Qwen3.5"
ACCELERATED = "the same, accelerate_cpu"


def efla_model(rule: str = "gated_delta", mixers: list[str] | None = None) -> Any:
    """Our decoder, randomly initialised: 4 layers of width 512."""
    torch.manual_seed(0)
    config = efla.EflaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_heads=HEADS,
        num_attention_heads=HEADS,
        intermediate_size=MLP,
        rule=rule,
        mixers=mixers,
        output_gate=True,
        max_position_embeddings=2 * max(CONTEXTS),
    )
    return efla.EflaForCausalLM(config)


def transformers_model() -> Any:
    """Qwen3.5's text decoder of the same size, every layer a gated delta rule."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        intermediate_size=MLP,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=WIDTH,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=WIDTH,
        linear_value_head_dim=WIDTH,
        layer_types=["linear_attention"] * LAYERS,
    )
    return Qwen3_5ForCausalLM(config)


def throughput(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """Prefill, and a training step with AdamW, at 2,048 tokens."""
    models = {
        "efla gated_delta": efla_model(),
        "efla": efla_model("efla"),
        TRANSFORMERS: transformers_model(),
    }
    tokens = torch.randint(VOCABULARY, (1, PREFILL_LENGTH), generator=torch.Generator().manual_seed(0))
    sizes = ", ".join(f"{name} {sum(p.numel() for p in model.parameters()):,}" for name, model in models.items())
    calls = {name: _prefill_call(model, tokens) for name, model in models.items()}
    calls[ACCELERATED] = _accelerated(calls[TRANSFORMERS])
    prefill = [Contender(name, call) for name, call in calls.items()]
    work = f"B1 T{PREFILL_LENGTH}, {LAYERS} layers of {HIDDEN} (parameters: {sizes})"
    yield compare(f"prefill {work}", prefill, threads=threads, rounds=rounds)
    calls = {name: _training_call(model, tokens) for name, model in models.items()}
    calls[ACCELERATED] = _accelerated(calls[TRANSFORMERS])
    training = [Contender(name, call) for name, call in calls.items()]
    yield compare(f"training step {work}", training, threads=threads, rounds=rounds)


def contexts(threads: int, rounds: int) -> Iterator[list[Measurement]]:
    """One decoded token after a short and after a long context: constant for a memory, growing for softmax attention."""
    for name, mixers in (("efla", None), ("softmax", ["softmax"])):
        model = efla_model("efla", mixers).eval()
        contenders = []
        for context in CONTEXTS:
            cache = _softmax_cache(model, context) if mixers else _prefilled_cache(model, context)
            contenders.append(Contender(f"{name} after {context:,}", _decode_call(model, cache), repeats=4))
            if not mixers:
                _check_state_bytes(model, cache)
        work = f"decode one token, {name}, {LAYERS} layers of {HIDDEN}"
        yield compare(work, contenders, threads=threads, rounds=3 * rounds)


SUITES: dict[str, Callable[[int, int], Iterator[list[Measurement]]]] = {"throughput": throughput, "contexts": contexts}


def _prefill_call(model: Any, tokens: torch.Tensor) -> Callable[[], object]:
    def call() -> object:
        model.eval()
        return model(tokens, use_cache=False, logits_to_keep=1)  # transformers refuses a cache of linear layers alone

    return call


def _accelerated(call: Callable[[], object]) -> Callable[[], object]:
    """The same call with transformers' functions replaced by ours while it runs."""

    def accelerated() -> object:
        with accelerate_cpu():
            return call()

    return accelerated


def _training_call(model: Any, tokens: torch.Tensor) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    @torch.enable_grad()
    def call() -> object:
        model.train()
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss

    return call


def _decode_call(model: Any, cache: Any) -> Callable[[], object]:
    token = torch.tensor([[7]])

    def call() -> object:
        return model(token, past_key_values=cache, use_cache=True)

    return call


@torch.no_grad()
def _prefilled_cache(model: Any, context: int) -> Any:
    """The cache after really reading that many random tokens, in pieces."""
    tokens = torch.randint(VOCABULARY, (1, context), generator=torch.Generator().manual_seed(0))
    cache = None
    for piece in tokens.split(PREFILL_CHUNK, dim=1):
        cache = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    return cache


@torch.no_grad()
def _softmax_cache(model: Any, context: int) -> Any:
    """A cache of that many random keys and values: reading them would take minutes and cost decoding nothing."""
    cache = model(torch.tensor([[7]]), use_cache=True).past_key_values
    for layer in range(LAYERS):
        keys, values = torch.randn(2, 1, HEADS, context - 1, HIDDEN // HEADS)
        cache.update(keys, values, layer)
    return cache


def _check_state_bytes(model: Any, cache: Any) -> None:
    """The tensors of the cache hold exactly the bytes that the formula of :mod:`efla.models.accounting` says."""
    held = 0
    for layer in cache.layers:
        for states in (layer.conv_states, layer.recurrent_states):
            held += sum(x.numel() * x.element_size() for x in states.values())
    expected = state_bytes(model.config)
    if held != expected:
        raise RuntimeError(f"the cache holds {held:,} bytes a sequence, the formula says {expected:,}")
    print(f"state per sequence: {held:,} bytes, as the formula says, at every length")
