"""``efla info``, ``efla generate`` and ``efla convert``: commands on one model."""

from __future__ import annotations

import json as json_format
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import tyro

from efla.errors import refuse_ignored

if TYPE_CHECKING:
    from efla.models.configuration_efla import EflaConfig


def info(model: Annotated[str, tyro.conf.Positional], context: int = 2048, json: bool = False) -> int:
    """Print a model's mixers, sizes, parameters, state per sequence and operations per token.

    Args:
        model: A folder written by efla train or save_pretrained, a name on the Hugging Face hub, or a preset.
        context: Number of previous tokens, for the operations and memory of softmax layers.
        json: Print JSON instead of a table.
    """
    from efla.models import presets
    from efla.models.loading import load_config

    facts = describe(load_config(model), context)
    if json:
        print(json_format.dumps({"model": model, **facts}, indent=2))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        print(f"{name.replace('_', ' '):<{width}}  {shown}")
    is_preset = model in presets.names()
    print(f"next: efla {f'train --model {model}' if is_preset else f'generate {model} --prompt TEXT'}")
    return 0


def describe(config: EflaConfig, context: int) -> dict[str, Any]:
    """Facts about a configuration, in the order in which they are printed."""
    from efla.models import accounting

    mixers = cast("list[str]", config.mixers)
    facts: dict[str, Any] = {
        "mixers": ", ".join(f"{name} x {count}" for name, count in Counter(mixers).items()),
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
    }
    if any(mixer not in ("softmax", "mamba2") for mixer in mixers):
        facts["heads"] = f"{config.num_heads} (keys {config.head_dim}, values {config.value_head_dim} wide)"
    if "softmax" in mixers:
        facts["attention_heads"] = f"{config.num_attention_heads} ({config.attention_head_dim} wide)"
    parameters = accounting.count_parameters(config)
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    facts |= {
        "mlp_width": config.intermediate_size or 0,
        "vocabulary": config.vocab_size,
        "parameters": parameters,
        "parameters_without_embeddings": parameters - embeddings,
        "state_bytes_per_sequence": accounting.state_bytes(config),
        "cache_bytes_per_token": accounting.cache_bytes_per_token(config),
        f"flops_per_token_after_{context}": accounting.flops_per_token(config, context),
    }
    return facts


def generate(
    model: Annotated[str, tyro.conf.Positional],
    prompt: str,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    tokenizer: str | None = None,
    device: str = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    weights: Literal["float16", "int8"] | None = None,
    state: Path | None = None,
    threads: int | None = None,
) -> int:
    """Continue a prompt. Text is printed as it is generated, then tokens per second (on stderr).

    Args:
        model: A folder written by efla train or save_pretrained, a name on the Hugging Face hub, or a file written by
            efla export onnx.
        prompt: Text to continue; "-" reads it from standard input.
        max_new_tokens: Maximum number of new tokens.
        temperature: 0 takes the most likely token, which small models soon repeat; above 0 samples.
        top_k: Sample only among the k most likely tokens (0: among all).
        top_p: Sample only among the most likely tokens of this total probability.
        seed: Seed of the sampling.
        tokenizer: Tokenizer folder or name, if the model's folder has none; bytes if the vocabulary is 256.
        device: auto, cpu or cuda.
        dtype: Precision of the model; auto uses the checkpoint's, or float32 on a CPU that computes faster in it.
        weights: Store the linear maps in 2 bytes or 1 byte a weight and compute the rest in float32: faster on a CPU.
        state: File with what the model has read. If it exists, the prompt continues from there; then it is overwritten.
        threads: CPU threads (default: torch's number).
    """
    if max_new_tokens < 1 or temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(
            "--max-new-tokens must be at least 1, --temperature and --top-k at least 0, and --top-p above 0 and at most 1; "
            f"got {max_new_tokens}, {temperature:g}, {top_k} and {top_p:g}"
        )
    refuse_ignored(
        {"top-k": temperature == 0 and top_k != 0, "top-p": temperature == 0 and top_p != 1}, "at --temperature 0"
    )
    if state is not None:
        _check_state_file(state)
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    if model.endswith(".onnx"):
        given = {
            "tokenizer": tokenizer is not None,
            "device": device not in ("auto", "cpu"),
            "threads": threads is not None,
        }
        refuse_ignored({**given, "dtype": dtype != "auto", "weights": weights is not None}, "with an ONNX file")
        return _generate_onnx(model, text, state, max_new_tokens=max_new_tokens, seed=seed, **sampling)
    refuse_ignored({"dtype": weights is not None and dtype != "auto"}, "with --weights")
    import torch
    from transformers import DynamicCache

    from efla.integrations.transformers import accelerate_model
    from efla.models.cache import seen_tokens
    from efla.models.loading import load_model
    from efla.models.tokenizer import TimedStreamer

    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(model, tokenizer=tokenizer, device=device, dtype=dtype, weights=weights)
    cache = None
    if state is not None:
        from efla import state as states

        kind = loaded.model.config.model_type
        if kind != "efla":
            raise ValueError(
                f"--state keeps what an EFLA model has read, and {model} is a {kind!r} model; leave --state out"
            )
        cache = states.load(state, loaded.model) if state.exists() else DynamicCache(config=loaded.model.config)
    seen = seen_tokens(cache)
    encoded = loaded.tokenizer.encode(text, add_special_tokens=seen == 0)
    ids = torch.tensor([encoded], dtype=torch.long, device=loaded.model.device)
    if ids.shape[1] == 0:
        raise ValueError("the prompt has no tokens; give some text")
    streamer = TimedStreamer(loaded.tokenizer, lambda piece: print(piece, end="", flush=True))
    torch.manual_seed(seed)
    print(text, end="", flush=True)
    with accelerate_model(loaded.model), torch.inference_mode():
        pad_token_id = loaded.model.config.pad_token_id
        written = loaded.model.generate(
            ids,
            attention_mask=torch.ones(1, seen + ids.shape[1], dtype=torch.long, device=ids.device),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            streamer=streamer,
            pad_token_id=0 if pad_token_id is None else pad_token_id,
            **(sampling if temperature > 0 else {}),
        )
        if state is not None:
            loaded.model(written[:, -1:], past_key_values=cache, use_cache=True)  # chosen, but not read yet
            states.save(cast("DynamicCache", cache), state)
    print()
    print(f"{_rates(ids.shape[1], streamer.times)}\nnext: efla eval {model} --tasks paper", file=sys.stderr)
    return 0


def _check_state_file(file: Path) -> None:
    """Refuse a file in a folder that takes none, before there is a text to lose."""
    if file.is_dir():
        raise ValueError(f"--state {file} is a folder; name a file, such as {file / 'state'}")
    if not file.parent.is_dir():
        raise ValueError(f"--state {file}: there is no folder {file.parent}; create it, or name a file in another")
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ValueError(f"--state {file}: cannot write there ({error.strerror}); name a file elsewhere") from error


def _generate_onnx(path: str, prompt: str, state: Path | None, **options: Any) -> int:
    """The same from an exported file, without torch."""
    from efla.onnx import Runner

    runner = Runner(path)
    memory = runner.load_state(state) if state is not None and state.exists() else runner.new_state()
    seen = memory.num_tokens
    print(prompt, end="", flush=True)
    times = [time.perf_counter()]
    for piece in runner.stream(prompt, state=memory, **options):
        print(piece, end="", flush=True)
        times.append(time.perf_counter())
    print()
    num_new = len(times) - 2  # the last piece holds what is left of an incomplete character
    print(_rates(memory.num_tokens - seen - num_new, times[:-1]), file=sys.stderr)
    if state is not None:
        memory.save(state)
    return 0


def _rates(num_prompt: int, times: list[float]) -> str:
    """Tokens per second of the prompt, up to the first new token, and of the other new tokens."""
    num_new = len(times) - 1
    line = f"prompt: {num_prompt} tokens"
    if num_new >= 1:
        line += f", {num_prompt / max(times[1] - times[0], 1e-9):,.0f} tokens/s"
    line += f"; new: {num_new} tokens"
    if num_new >= 2:
        line += f", {(num_new - 1) / max(times[-1] - times[1], 1e-9):,.1f} tokens/s"
    return line


def convert(source: Annotated[str, tyro.conf.Positional], target: Annotated[Path, tyro.conf.Positional]) -> int:
    """Convert a checkpoint folder between flash-linear-attention and efla; the source's config.json sets the direction.

    From flash-linear-attention (delta_net, gated_deltanet, mamba2, transformer; also transformers' mamba2) to efla, and from
    efla to flash-linear-attention where it has a counterpart.

    Args:
        source: Folder with config.json and *.safetensors, or one written by efla train.
        target: New folder for the result.
    """
    from efla.models.convert import convert_folder
    from efla.models.loading import find_model

    config = convert_folder(find_model(source), target)
    mixers = config.get("mixers")
    layers = f", layers {', '.join(dict.fromkeys(mixers))}" if mixers else ""
    print(f"{target}: model_type {config['model_type']}{layers}")
    if config["model_type"] == "efla":
        print(f"next: efla generate {target} --prompt TEXT")
    return 0
