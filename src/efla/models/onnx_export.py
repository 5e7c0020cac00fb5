"""A model as an ONNX file that checks itself: ``efla.models.export_onnx(model, "model.onnx")``."""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import efla
from efla.models.identity import identify
from efla.models.modeling_efla import EflaForCausalLM
from efla.models.tokenizer import is_byte_tokenizer
from efla.onnx import FORMAT, Runner

# A protobuf message cannot be larger. The graph itself takes well under the rest.
_LARGEST_FILE = 2**31 - 2**24
_TOLERANCE = 1e-3
_CHECK = 2, 40  # sequences, tokens; the last eight one at a time


@dataclass(frozen=True)
class Exported:
    """What was written, and how far its logits are from the model's.

    difference, scale: the largest difference from, and the largest of, the model's logits on random tokens.
    """

    path: Path
    num_bytes: int
    difference: float
    scale: float


def export_onnx(
    model: EflaForCausalLM,
    path: str | Path,
    *,
    quantize: str | None = None,
    last_logits: bool = False,
    tokenizer: Any = None,
) -> Exported:
    """Write the model as one ONNX graph for prefill and decoding, and compare the file's logits with the model's.

    quantize: "int8" or "int4" weights in the products, with a scale for 32 weights; gates, norms and convolutions stay float32.
    last_logits: logits of the last token only, [B, 1, vocabulary].
    tokenizer: stored with the model, so that :class:`efla.onnx.Runner` takes text; any fast tokenizer of transformers.

    Weights above 2 GB go to a second file, ``path`` + ".data". Needs the packages onnx and onnxruntime >= 1.25.1.
    """
    if not isinstance(model, EflaForCausalLM):
        raise ValueError(
            f"expected an EflaForCausalLM, got {type(model).__name__}; models of other classes have no graph here"
        )
    try:
        import onnx

        from efla.models.onnx_graph import build, to_model
    except ImportError as error:
        raise RuntimeError(f"the export needs the package onnx ({error}): pip install 'efla[onnx]'") from error
    path = Path(path)
    graph = build(model, quantize=quantize, last_logits=last_logits)
    metadata = {
        "efla.format": str(FORMAT),
        "efla.version": efla.__version__,
        "efla.config": model.config.to_json_string(use_diff=False),
        "efla.model": _identity(model, quantize),
        "efla.states": json.dumps(graph.states),
        "efla.tokenizer": _describe(tokenizer),
        "efla.quantize": quantize or "none",
    }
    proto = to_model(graph, model.config.vocab_size, metadata)
    is_large = sum(len(weight.raw_data) for weight in graph.weights) > _LARGEST_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    # What does not pass its check never gets the name that was asked for.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        draft = Path(folder) / path.name
        external = f"{path.name}.data"
        onnx.save_model(proto, draft, save_as_external_data=is_large, location=external, size_threshold=1024)
        difference, scale = _compare(model, draft)
        if not np.isfinite(difference) or (quantize is None and difference > _TOLERANCE * scale):
            raise RuntimeError(
                f"the exported graph's logits differ from the model's by {difference:.3g}, where the largest is {scale:.3g}; "
                "nothing was written. Modules that were replaced or have hooks are not exported"
            )
        files = [path.with_name(file.name) for file in Path(folder).iterdir()]
        for file in files:
            (Path(folder) / file.name).replace(file)
    if not is_large:
        path.with_name(external).unlink(missing_ok=True)  # of an earlier, larger model
    return Exported(path, sum(file.stat().st_size for file in files), difference, scale)


def _identity(model: EflaForCausalLM, quantize: str | None) -> str:
    """A hash of what a state of the exported model depends on."""
    return hashlib.sha256(json.dumps({**identify(model), "quantize": quantize}, sort_keys=True).encode()).hexdigest()


def _describe(tokenizer: Any) -> str:
    """The tokenizer's metadata: "bytes", the text of a tokenizer.json, or "none"."""
    if tokenizer is None:
        return "none"
    if is_byte_tokenizer(tokenizer):
        return "bytes"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "none" if backend is None else str(backend.to_str())


@torch.no_grad()
def _compare(model: EflaForCausalLM, path: Path) -> tuple[float, float]:
    """Largest difference of the file's logits from the model's, and the largest logit: prefill, then single tokens."""
    B, T = _CHECK
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (B, T), generator=generator)
    was_training = model.training
    oracle = (
        model if model.dtype == torch.float32 and model.device.type == "cpu" else copy.deepcopy(model).cpu().float()
    )
    oracle.eval()
    try:
        expected = oracle(tokens, use_cache=False).logits.numpy()
    finally:
        model.train(was_training)
    runner = Runner(path, num_threads=torch.get_num_threads())
    state, pieces = None, []
    for piece in (tokens[:, :-8], *tokens[:, -8:].split(1, dim=1)):
        logits, state = runner(piece.numpy(), state)
        pieces.append(logits)
    given = np.concatenate(pieces, axis=1)
    expected = expected[:, -given.shape[1] :]
    return float(np.abs(given - expected).max()), float(np.abs(expected).max())
