"""``efla generate``: text from a model, as it comes."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import tyro

from efla.errors import refuse_ignored


def generate(
    model: Annotated[str, tyro.conf.Positional],
    prompt: str,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    tokenizer: str | None = None,
    device: str = "cpu",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
) -> int:
    """Continue a prompt, printing text as it comes, then tokens per second (on stderr).

    Args:
        model: A folder written by save_pretrained or efla train, or a name on the Hugging Face hub.
        prompt: Text to continue; "-" reads it from standard input.
        max_new_tokens: Stop after so many tokens.
        temperature: 0 takes the likeliest token, which in a small model soon repeats itself; above 0 samples.
        top_k: Sample among the k likeliest tokens only (0: among all).
        top_p: Sample among the likeliest tokens of this total probability only.
        seed: Seed of the sampling.
        tokenizer: Tokenizer folder or name, if the model's folder has none. A vocabulary of 256 is bytes.
        device: Where to run, such as cpu or cuda.
        dtype: Precision of the weights; auto is the checkpoint's own.
    """
    import torch
    from transformers.utils import logging

    from efla.cli.info import load_config
    from efla.models import presets
    from efla.models.modeling_efla import EflaForCausalLM
    from efla.models.text import TimedStreamer, as_batch, load_codec

    if model in presets.names():
        raise ValueError(f"{model!r} is a preset without weights; train it first: efla train --help")
    if max_new_tokens < 1 or temperature < 0:
        raise ValueError(
            f"max_new_tokens must be at least 1 and temperature at least 0, got {max_new_tokens}, {temperature}"
        )
    refuse_ignored(
        {"top-k": temperature == 0 and top_k != 0, "top-p": temperature == 0 and top_p != 1}, "at --temperature 0"
    )
    logging.disable_progress_bar()  # of loading weights, which would stand within the text
    config = load_config(model)
    codec = load_codec(model, config, tokenizer)
    network: Any = EflaForCausalLM.from_pretrained(model, dtype=dtype)
    network.to(device).eval()
    text = sys.stdin.read() if prompt == "-" else prompt
    ids = as_batch(codec.encode(text), device)
    if ids.shape[1] == 0:
        raise ValueError("the prompt has no tokens; give some text")
    streamer = TimedStreamer(codec, lambda piece: print(piece, end="", flush=True))
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if temperature > 0 else {}
    torch.manual_seed(seed)
    print(text, end="", flush=True)
    with torch.inference_mode():
        network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            streamer=streamer,
            pad_token_id=config.pad_token_id if config.pad_token_id is not None else 0,
            **sampling,
        )
    print()
    print(_rates(ids.shape[1], streamer.times), file=sys.stderr)
    return 0


def _rates(num_prompt: int, times: list[float]) -> str:
    """Tokens per second: the prompt's up to the first new token, then the others'."""
    num_new = len(times) - 1
    line = f"prompt: {num_prompt} tokens"
    if num_new >= 1:
        line += f", {num_prompt / max(times[1] - times[0], 1e-9):,.0f} tokens/s"
    line += f"; new: {num_new} tokens"
    if num_new >= 2:
        line += f", {(num_new - 1) / max(times[-1] - times[1], 1e-9):,.1f} tokens/s"
    return line
