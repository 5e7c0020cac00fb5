"""Whole models compared with transformers models of the same size, and the cost of a token at different context lengths."""

import copy
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import efla
from efla import state
from efla.bench import Suite, decode_call, prefill_call, qwen, random_tokens, read, training_call
from efla.bench.qwen import ACCELERATED, FLOOR, TRANSFORMERS, accelerated, products, qwen_model, sizes_of
from efla.bench.scan import SAMPLE_SECONDS
from efla.models.accounting import parameter_count, state_bytes
from efla.models.cache import cached_state_bytes
from efla.models.quantization import WEIGHTS, pack_linears
from efla.runs.timing import Measurement, compare

HIDDEN, LAYERS, HEADS, MLP, VOCABULARY = 512, 4, 4, 1536, 1024
PREFILL_LENGTH = 2048
CONTEXTS = (1_000, 100_000)
TOKENS, CONTEXT = 64, 10_000  # of the suites rewind and loading
# Models that are compared with their own matrix products: presets, and ``efla_model`` of the rule named first.
SIZES = ("efla-tiny", "gated-efla-tiny", "efla 4x512", "gated_efla 4x512", "efla-340m", "gated-efla-340m")
BATCHES = (1, 8)
PROMPT = 512
MODEL, ONNX = "model", "ONNX Runtime"


def random_model(**fields: Any) -> Any:
    """A randomly initialised EFLA decoder of 4 layers with 4 heads."""
    torch.manual_seed(0)
    config = efla.EflaConfig(num_hidden_layers=LAYERS, num_heads=HEADS, num_attention_heads=HEADS, **fields)
    return efla.EflaForCausalLM(config)


def efla_model(rule: str = "gated_delta", mixers: list[str] | None = None) -> Any:
    """The decoder that is compared with transformers' at the same size."""
    return random_model(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        rule=rule,
        mixers=mixers,
        output_gate=True,
        max_position_embeddings=2 * max(CONTEXTS),
    )


def llama_model(config: Any) -> Any:
    """Llama at the size of our config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes_of(config), num_attention_heads=config.num_attention_heads))


def parameter_counts(models: dict[str, Any]) -> str:
    return ", ".join(f"{name} {parameter_count(model):,}" for name, model in models.items())


def throughput(rounds: int) -> Iterator[list[Measurement]]:
    """Prefill, and a training step with AdamW, at 2,048 tokens."""
    models = {"efla gated_delta": efla_model(), "efla": efla_model("efla")}
    models[TRANSFORMERS] = qwen_model(models["efla"].config)
    tokens = random_tokens(VOCABULARY, 1, PREFILL_LENGTH)
    size = f"B1 T{PREFILL_LENGTH}, {LAYERS} layers of {HIDDEN} (parameters: {parameter_counts(models)})"
    for work, make_call in (("prefill", prefill_call), ("training step", training_call)):
        calls = {name: make_call(model, tokens) for name, model in models.items()}
        calls[ACCELERATED] = accelerated(calls[TRANSFORMERS])
        yield compare(f"{work} {size}", calls, rounds=rounds)


def contexts(rounds: int) -> Iterator[list[Measurement]]:
    """One decoded token after a short and a long context: constant for linear attention, growing for softmax attention."""
    for name, mixers in (("efla", None), ("softmax", ["softmax"])):
        model = efla_model("efla", mixers).eval()
        calls = {}
        for context in CONTEXTS:
            tokens = random_tokens(VOCABULARY, 1, context)
            cache = _softmax_cache(model, context) if mixers else read(model, tokens)
            calls[f"{name} after {context:,}"] = decode_call(model, cache)
            if not mixers:
                _check_state_bytes(model, cache)
        work = f"decode one token, {name}, {LAYERS} layers of {HIDDEN}"
        yield compare(work, calls, rounds=3 * rounds, repeats=4)


def decode(rounds: int) -> Iterator[list[Measurement]]:
    """One decoded token against the model's own matrix products (``F.linear`` at the same shapes) and ONNX Runtime."""
    for size, model in _sized_models():
        runner = _onnx_runner(model)
        for batch in BATCHES:
            tokens = random_tokens(model.config.vocab_size, batch, PROMPT)
            decoding = decode_call(model, read(model, tokens), batch)
            calls = _inference({MODEL: decoding, FLOOR: products(model, batch, batch)})
            if runner is not None:
                _, past = runner(tokens.numpy())
                calls[ONNX] = partial(runner, tokens[:, :1].numpy(), past)
            work = f"decode batch {batch}, {size}"
            yield compare(work, calls, rounds=3 * rounds, items=batch, sample_seconds=SAMPLE_SECONDS)


def weights(rounds: int) -> Iterator[list[Measurement]]:
    """One decoded token with weights of 4, 2 and 1 bytes against the float32 matrix products (efla only, not gated)."""
    for size, model in _sized_models():
        if size.startswith("gated"):
            continue
        models = {MODEL: model} | {f"{name} weights": pack_linears(copy.deepcopy(model), name) for name in WEIGHTS}
        for batch in BATCHES:
            tokens = random_tokens(model.config.vocab_size, batch, PROMPT)
            calls: dict[str, Callable[[], object]] = {FLOOR: products(model, batch, batch)}
            calls |= {name: decode_call(each, read(each, tokens), batch) for name, each in models.items()}
            work = f"weights, decode batch {batch}, {size}"
            yield compare(work, _inference(calls), rounds=3 * rounds, items=batch, sample_seconds=SAMPLE_SECONDS)


def prefill(rounds: int) -> Iterator[list[Measurement]]:
    """A prompt against the model's own matrix products."""
    for size, batch, model, tokens in _prompts():
        calls = _inference({MODEL: prefill_call(model, tokens), FLOOR: products(model, tokens.numel(), batch)})
        yield compare(f"prefill {PROMPT} batch {batch}, {size}", calls, rounds=rounds, items=tokens.numel())


def step(rounds: int) -> Iterator[list[Measurement]]:
    """A training step against the model's own matrix products: one forward and two backward per weight."""
    for size, batch, model, tokens in _prompts():
        count = tokens.numel()
        calls = {MODEL: training_call(model, tokens), FLOOR: products(model, count, count, backward=True)}
        yield compare(f"training step {PROMPT} batch {batch}, {size}", calls, rounds=rounds, items=count)


def _prompts() -> Iterator[tuple[str, int, Any, torch.Tensor]]:
    """Every model of ``SIZES`` with ``PROMPT`` random tokens for each batch size: (size, batch, model, tokens)."""
    for size, model in _sized_models():
        for batch in BATCHES:
            yield size, batch, model, random_tokens(model.config.vocab_size, batch, PROMPT)


def _onnx_runner(model: Any) -> Any:
    """The exported model on ONNX Runtime, or ``None`` where the extra 'onnx' is not installed."""
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        print("ONNX Runtime: skipped, pip install 'efla[onnx]'")
        return None
    from efla.models.onnx_export import export_onnx
    from efla.onnx import Runner

    with tempfile.TemporaryDirectory() as folder:
        export_onnx(model, Path(folder) / "model.onnx", last_logits=True)
        # Its threads would go on waiting busily beside the next contender, and take a core from it.
        quiet = {"session.force_spinning_stop": "1"}
        return Runner(Path(folder) / "model.onnx", num_threads=torch.get_num_threads(), settings=quiet)


def _sized_models() -> Iterator[tuple[str, Any]]:
    """Randomly initialised models of ``SIZES``, one after another."""
    for size in SIZES:
        torch.manual_seed(0)
        is_preset = size in efla.presets.names()
        yield size, efla.EflaForCausalLM(efla.presets.get(size)).eval() if is_preset else efla_model(size.split()[0])


def rewind(rounds: int) -> Iterator[list[Measurement]]:
    """64 decoded tokens with and without the log that lets tokens be taken back."""
    model = efla_model("efla").eval()
    caches = {name: read(model, torch.zeros(1, 8, dtype=torch.long)) for name in ("decode", "decode, logged")}
    caches["decode, logged"].activate_past_recording()
    calls = {name: decode_call(model, cache, times=TOKENS) for name, cache in caches.items()}
    yield compare(f"decode {TOKENS}, 4 layers of 512", calls, rounds=rounds, items=TOKENS)


def loading(rounds: int) -> Iterator[list[Measurement]]:
    """10,000 tokens, read or loaded."""
    model = efla_model("efla").eval()
    tokens = random_tokens(VOCABULARY, 1, CONTEXT)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.safetensors"
        state.save(read(model, tokens), file)
        calls = {"read": lambda: read(model, tokens), "load": lambda: state.load(file, model)}
        work = f"the state after {CONTEXT:,} tokens, 4 layers of 512"
        yield compare(work, calls, rounds=rounds, items=CONTEXT)


_OWN = (throughput, contexts, decode, weights, prefill, step)
SUITES: dict[str, Suite] = {**{f.__name__: f for f in _OWN}, **qwen.SUITES, "rewind": rewind, "loading": loading}


def _inference(calls: dict[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    return {name: torch.inference_mode()(call) for name, call in calls.items()}


@torch.no_grad()
def _softmax_cache(model: Any, context: int) -> Any:
    """A cache of ``context`` random keys and values. Prefilling would take minutes; decoding costs the same either way."""
    cache = model(torch.tensor([[7]]), use_cache=True).past_key_values
    for layer in range(LAYERS):
        keys, values = torch.randn(2, 1, HEADS, context - 1, HIDDEN // HEADS)
        cache.update(keys, values, layer)
    return cache


def _check_state_bytes(model: Any, cache: Any) -> None:
    """Check that the cache's tensors hold exactly the bytes that :mod:`efla.models.accounting` computes."""
    held, expected = cached_state_bytes(cache), state_bytes(model.config)
    if held != expected:
        raise RuntimeError(f"the cache holds {held:,} bytes a sequence, the formula says {expected:,}")
    print(f"state per sequence: {held:,} bytes, as the formula says, at every length")
