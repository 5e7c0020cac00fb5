"""A sample of what the model would write, during training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from efla.data.tokenizers import TextTokenizer
from efla.train.engine import Engine, unwrap

_TEMPERATURE = 0.8


def sample(
    model: nn.Module, tokenizer: TextTokenizer, prompt: str, num_tokens: int, *, engine: Engine, precision: str
) -> str | None:
    """A continuation of ``prompt`` by ``num_tokens`` tokens, drawn at temperature 0.8 with a fixed seed.

    The training's own random numbers are not touched. Ranks other than the main one return ``None``, after helping
    where weights are sharded.
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
