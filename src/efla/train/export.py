"""The trained model as a folder that transformers, ``efla generate`` and ``efla eval`` load: safetensors and tokenizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from efla.data.tokenizers import TextTokenizer
from efla.models.loading import without_progress_bars
from efla.train.engine import Engine, unwrap
from efla.train.output import explain_write


def export(model: nn.Module, tokenizer: TextTokenizer, folder: Path, engine: Engine) -> None:
    """Write the whole weights, gathered from all ranks; an older export is replaced in one step."""
    network: Any = unwrap(model)
    weights = {}
    for name, tensor in network.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if engine.is_main:
            weights[name] = whole.detach().to("cpu", torch.float32)
    if engine.is_main:
        temporary, old = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            with without_progress_bars():
                network.save_pretrained(temporary, state_dict=weights)
            tokenizer.save(temporary)
            if folder.exists():
                os.replace(folder, old)
            os.replace(temporary, folder)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise explain_write(error, folder) from error
    engine.barrier()
