"""Use of the trained model: a folder that transformers, ``efla generate`` and ``efla eval`` load, and text samples."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from efla.data.tokenizers import TextTokenizer
from efla.models.loading import without_progress_bars
from efla.runs.rows import explain_write
from efla.train.engine import Engine, unwrap

_TEMPERATURE = 0.8


def export(model: nn.Module, tokenizer: TextTokenizer, folder: Path, engine: Engine) -> None:
    """Gather the weights from all ranks and write them, with the tokenizer; an older export is replaced at once."""
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


def sample(
    model: nn.Module, tokenizer: TextTokenizer, prompt: str, num_tokens: int, *, engine: Engine, precision: str
) -> str | None:
    """A continuation of ``prompt`` by ``num_tokens`` tokens, at temperature 0.8 with a fixed seed.

    The random state of training is unchanged. Other ranks than the main one return ``None``; they take part if weights
    are sharded.
    """
    if not engine.is_main and not isinstance(model, FSDPModule):
        return None
    network: Any = unwrap(model)
    was_training = network.training
    network.eval()
    ids = torch.tensor(tokenizer.encode([prompt])[0].astype("int64"), device=engine.device)[None]
    devices = [engine.device] if engine.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(), engine.whole_sequences(), engine.autocast(precision):
        torch.manual_seed(0)
        tokens = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=True,
            temperature=_TEMPERATURE,
            top_k=0,
            pad_token_id=0,
        )
    network.train(was_training)
    return tokenizer.decode(tokens[0, ids.shape[1] :].tolist())
