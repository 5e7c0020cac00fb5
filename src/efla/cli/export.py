"""``efla export``: a model in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro


def export(
    format: Annotated[Literal["onnx"], tyro.conf.Positional],
    model: Annotated[str, tyro.conf.Positional],
    output: Annotated[Path, tyro.conf.Positional],
    quantize: Literal["int8", "int4"] | None = None,
    last_logits: bool = False,
    tokenizer: str | None = None,
) -> int:
    """Write a model as an ONNX file for onnxruntime, and compare its logits with the model's on random tokens.

    Args:
        format: The format, onnx.
        model: A folder written by save_pretrained or efla train, or a name on the Hugging Face hub.
        output: The file to write, such as model.onnx. Weights above 2 GB go to a second file, OUTPUT.data.
        quantize: Weights of 8 or 4 bits in the matrix products (default: float32).
        last_logits: Compute the logits of the last token only, as generation needs.
        tokenizer: Tokenizer folder or name, if the model's folder has none; bytes if the vocabulary is 256.
    """
    from efla.models.loading import load_model
    from efla.models.onnx_export import export_onnx

    loaded = load_model(model, tokenizer=tokenizer, dtype="float32")
    done = export_onnx(loaded.model, output, quantize=quantize, last_logits=last_logits, tokenizer=loaded.tokenizer)
    print(f"{done.path}: {done.num_bytes:,} bytes")
    print(
        f"largest difference of the logits on random tokens: {done.difference:.3g} "
        f"(the largest logit is {done.scale:.3g})"
    )
    print(f"next: efla generate {done.path} --prompt TEXT; in Python without torch: efla.onnx.Runner")
    return 0
