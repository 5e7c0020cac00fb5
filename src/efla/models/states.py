"""Copies of a model's state (transformers' cache), and whether it has one of constant size."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from efla.models.cache import count_tokens, seen_tokens


def fork(cache: Any, index: Tensor) -> Any:
    """A new cache whose sequence i is sequence ``index[i]`` of the given one, which stays as it is.

    Memories of recurrent layers are copied, as are the keys and values of softmax layers.
    """
    forked = copy.copy(cache)
    forked.layers = []
    for layer in cache.layers:
        twin = copy.copy(layer)
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(twin, name, dict(value))
        forked.layers.append(twin)
    forked.reorder_cache(index)  # selects into new tensors
    return forked


def join(caches: Sequence[Cache], config: Any) -> Cache:
    """One cache of the sequences of several, in their order. Every layer of the model must be a recurrent one of ours."""
    whole = DynamicCache(config=config)
    for layer in range(len(whole.layers)):
        convs = [x for cache in caches if (x := cache.get_conv_state(layer)) is not None]
        memories = [x for cache in caches if (x := cache.get_recurrent_state(layer)) is not None]
        whole.update_conv_state(torch.cat(convs), layer)
        whole.update_recurrent_state(torch.cat(memories), layer)
    count_tokens(whole, max(seen_tokens(cache) for cache in caches))
    return whole


def why_not_recurrent(model: Any) -> str | None:
    """Why a state cannot be carried over windows at constant cost and without end, or ``None`` if it can."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds and all(kind == "linear_attention" for kind in kinds):
        return None
    if kinds and "linear_attention" in kinds:
        return "some of its layers are softmax attention, whose positions end where training ended"
    return "its layers are softmax attention, whose positions end where training ended, or not known to be recurrent"
