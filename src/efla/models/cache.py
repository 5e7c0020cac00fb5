"""States in and out of transformers' cache, copies of it, and how many tokens it has seen.

The cache is transformers' own (``DynamicCache(config=config)``, or any other it makes from ``config.layer_types``).
"""

import copy
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from efla.layers.attention import MixerState

_SEEN = "_efla_seen_tokens"


def read_state(cache: Cache | None, layer_idx: int, batch_size: int) -> MixerState | None:
    """The state that the layer left in the cache, or ``None`` before the first token."""
    if cache is None:
        return None
    conv = cache.get_conv_state(layer_idx)
    memory = cache.get_recurrent_state(layer_idx)
    if memory is None:
        return None
    if memory.shape[0] != batch_size:
        raise ValueError(
            f"the cache holds states of {memory.shape[0]} sequences, but the input has {batch_size}; "
            "pass a batch of that size, or a new cache"
        )
    if torch.is_grad_enabled():
        # The cache is overwritten in place; the backward pass needs the old values.
        memory = memory.clone()
    return MixerState(conv, memory)


def write_state(cache: Cache, layer_idx: int, state: MixerState) -> None:
    """Put a layer's state into the cache. A layer without convolutions writes one zero: the cache expects a state."""
    conv = state.memory.new_zeros(state.memory.shape[0], 1, 1) if state.conv is None else state.conv
    if cache.get_conv_state(layer_idx) is not conv:
        cache.update_conv_state(conv, layer_idx)
    if cache.get_recurrent_state(layer_idx) is not state.memory:  # else it was updated in place
        cache.update_recurrent_state(state.memory, layer_idx)


def seen_tokens(cache: Cache | None) -> int:
    """Number of tokens the cache has seen."""
    if cache is None:
        return 0
    if not _is_all_recurrent(cache):
        return int(cache.get_seq_length())
    return int(getattr(cache, _SEEN, 0)) if cache.has_previous_state() else 0


def count_tokens(cache: Cache | None, num_tokens: int) -> None:
    """Add ``num_tokens`` to the number of tokens seen."""
    if cache is not None and _is_all_recurrent(cache):
        setattr(cache, _SEEN, seen_tokens(cache) + num_tokens)


def add_get_seq_length(cache: Cache | None) -> None:
    """Give a cache without attention layers the method ``get_seq_length``, which ``generate`` calls on every cache.

    transformers keeps the length in attention layers and raises without one.
    """
    if cache is not None and _is_all_recurrent(cache) and "get_seq_length" not in vars(cache):
        vars(cache)["get_seq_length"] = MethodType(_get_seq_length, cache)


def _get_seq_length(cache: Any, layer_idx: int = 0) -> int:
    return seen_tokens(cache)


def _is_all_recurrent(cache: Cache) -> bool:
    return len(cache.layers) > 0 and all(cache.is_linear)


def check_layers(cache: Cache, layer_types: list[str]) -> None:
    """Reject a cache that was made for another kind of model, such as ``DynamicCache()`` without a config."""
    if len(cache.layers) != len(layer_types) or any(
        is_linear != (kind == "linear_attention") for is_linear, kind in zip(cache.is_linear, layer_types, strict=True)
    ):
        raise ValueError(
            f"the cache has {len(cache.layers)} layers that do not match the model's {len(layer_types)}; "
            "make it with DynamicCache(config=model.config)"
        )


def cached_state_bytes(cache: Cache) -> int:
    """Bytes of all recurrent states in the cache (attention layers' keys and values not counted)."""
    total = 0
    for layer_idx, is_linear in enumerate(cache.is_linear):
        if is_linear:
            states: list[Tensor | None] = [cache.get_conv_state(layer_idx), cache.get_recurrent_state(layer_idx)]
            total += sum(x.numel() * x.element_size() for x in states if x is not None)
    return total


def select_rows(cache: Any, index: Tensor) -> Any:
    """A new cache whose sequence i is a copy of sequence ``index[i]`` of the given one."""
    selected = copy.copy(cache)
    selected.layers = []
    for layer in cache.layers:
        twin = copy.copy(layer)
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(twin, name, dict(value))
        selected.layers.append(twin)
    selected.reorder_cache(index)  # selects into new tensors
    return selected


def concat_caches(caches: Sequence[Cache], config: Any) -> Cache:
    """One cache with the sequences of several, in order. Every layer of the model must be one of our recurrent layers."""
    whole = DynamicCache(config=config)
    for layer in range(len(whole.layers)):
        convs = [x for cache in caches if (x := cache.get_conv_state(layer)) is not None]
        memories = [x for cache in caches if (x := cache.get_recurrent_state(layer)) is not None]
        whole.update_conv_state(torch.cat(convs), layer)
        whole.update_recurrent_state(torch.cat(memories), layer)
    count_tokens(whole, max(seen_tokens(cache) for cache in caches))
    return whole


def why_not_recurrent(model: Any) -> str | None:
    """Why the model cannot carry a state of constant size over any number of windows, or ``None`` if it can."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds and all(kind == "linear_attention" for kind in kinds):
        return None
    if kinds and "linear_attention" in kinds:
        return "some of its layers are softmax attention, whose positions end where training ended"
    return "its layers are softmax attention, whose positions end where training ended, or not known to be recurrent"
