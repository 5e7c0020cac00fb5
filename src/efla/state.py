"""The state of a model after some tokens as a thing of its own: save, load, fork, select, merge, and reuse of prefixes.

    cache = model(tokens, use_cache=True).past_key_values
    state.save(cache, "read.safetensors")
    cache = state.load("read.safetensors", model)

A state is what transformers' cache holds. That of recurrent layers has the same size after any number of tokens; the keys
and values of softmax layers, which grow, are kept with it. To take back the last tokens, call
``cache.activate_past_recording()`` before they are read and ``cache.crop(-n)`` after.
"""

import copy
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer

from efla.layers.attention import MixerState
from efla.models import cache as caches
from efla.models.configuration_efla import EflaConfig
from efla.models.identity import bytes_of, describe, difference, identify
from efla.runs.rows import write_atomically

__all__ = ["PrefixCache", "fork", "load", "merge", "save", "select"]

_FORMAT = "efla-state-1"


def save(cache: Cache, file: str | Path) -> None:
    """Write the state to a safetensors file that :func:`load` opens for the same model only.

    The header holds the configuration, a fingerprint of the weights, the number of tokens, the dtype and a checksum.
    """
    tensors = {name: tensor.detach().contiguous() for name, tensor in _filled_tensors(cache, "save").items()}
    model = caches.model_of(cache)
    if model is None:
        raise ValueError(
            "the cache was not filled by an efla model, or the model is gone; pass what model(...) returned"
        )
    header = {"format": _FORMAT, **identify(model), "tokens": str(caches.seen_tokens(cache))}
    header["sha256"] = _checksum(header, tensors)
    write_atomically(Path(file), serialize(tensors, header))


def load(file: str | Path, model: PreTrainedModel | EflaConfig) -> DynamicCache:
    """The state in a file written by :func:`save`, as a cache of ``model``; refused if another model made it.

    With a configuration in place of the model, the weights are not compared.
    """
    config: Any = model if isinstance(model, EflaConfig) else getattr(model, "config", None)
    if not isinstance(config, EflaConfig):
        raise ValueError(
            f"expected an EFLA model or its EflaConfig, got {type(model).__name__}; "
            "only the states of EFLA models are saved and loaded"
        )
    device = "cpu" if isinstance(model, EflaConfig) else str(next(model.parameters()).device)
    header, tensors = _read(Path(file), device)
    here = {**header, "config": describe(config)} if isinstance(model, EflaConfig) else identify(model)
    differing = difference(header, here)
    if differing:
        raise ValueError(
            f"{file} holds the state of {differing}; load it with the checkpoint that saved it, in torch.{header['dtype']}"
        )
    cache = DynamicCache(config=config)
    names = [f"layers.{index}.{name}" for index, layer in enumerate(cache.layers) for name in _fields(layer)]
    if sorted(names) != sorted(tensors):
        raise ValueError(f"{file} does not hold the layers of the model in its header; save the state again")
    layer: Any
    for index, layer in enumerate(cache.layers):
        first, second = (tensors[f"layers.{index}.{name}"] for name in _fields(layer))
        if isinstance(layer, LinearAttentionLayer):
            caches.write_state(layer, MixerState(first, second))
        else:
            layer.update(first, second)
    caches.count_tokens(cache, int(header["tokens"]))
    if isinstance(model, EflaConfig):
        caches.add_methods(cache)
    else:
        caches.adopt(cache, model, cast(list[str], config.layer_types))
    return cache


def select(cache: Any, rows: Tensor) -> Any:
    """A new cache whose sequence i is a copy of sequence ``rows[i]`` of the given one; it keeps no log to rewind."""
    selected = copy.copy(cache)
    own_methods = [vars(selected).pop(name, None) for name in ("crop", "get_seq_length")]  # bound to the original
    selected.layers = []
    for layer in cache.layers:
        twin = copy.copy(layer)
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(twin, name, dict(value))
        selected.layers.append(twin)
    selected.reorder_cache(rows)  # selects into new tensors
    for layer, twin in zip(cache.layers, selected.layers, strict=True):
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and vars(twin)[name] is value:  # the length of a static layer
                setattr(twin, name, value.clone())
    if any(own_methods):
        caches.add_methods(selected)
    return selected


def fork(cache: Any, count: int = 1) -> Any:
    """A new cache with ``count`` copies of each sequence, one after the other: for so many continuations."""
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    batch_size = next(iter(_filled_tensors(cache, "fork").values())).shape[0]
    return select(cache, torch.arange(batch_size).repeat_interleave(count))


def merge(parts: Sequence[Any]) -> Any:
    """One cache with the sequences of several, in order; refused unless they are of one model and dtype.

    The weights are compared where the models are known and still exist.
    """
    if not parts:
        raise ValueError("expected at least one cache to merge, got none")
    found = [_filled_tensors(part, "merge") for part in parts]
    _check_mergeable(parts, found)
    merged = fork(parts[0])
    for index, layer in enumerate(merged.layers):
        first, second = (torch.cat([tensors[f"layers.{index}.{name}"] for tensors in found]) for name in _fields(layer))
        if isinstance(layer, LinearAttentionLayer):
            layer.conv_states[0], layer.recurrent_states[0] = first, second
        else:
            layer.keys, layer.values = first, second
    caches.count_tokens(merged, max(map(caches.seen_tokens, parts)) - caches.seen_tokens(merged))
    return merged


def _check_mergeable(parts: Sequence[Any], found: Sequence[dict[str, Tensor]]) -> None:
    known = {number: model for number, part in enumerate(parts) if (model := caches.model_of(part)) is not None}
    for number, model in known.items():
        first = min(known)
        differing = None if model is known[first] else difference(identify(model), identify(known[first]))
        if differing:
            raise ValueError(
                f"parts[{number}] cannot be merged with parts[{first}]: it holds the state of {differing}; "
                "merge caches of one model"
            )
    kinds = [{name: f"{x.dtype} {list(x.shape[1:])}" for name, x in tensors.items()} for tensors in found]
    for number, kind in enumerate(kinds):
        for name in {**kinds[0], **kind}:
            if kind.get(name) != kinds[0].get(name):
                raise ValueError(
                    f"parts[{number}] differs from parts[0] in more than its number of sequences: {name} is "
                    f"{kind.get(name, 'missing')} there, {kinds[0].get(name, 'missing')} here; merge caches of one model "
                    "and dtype, and with softmax layers those of one length"
                )


class PrefixCache:
    """States after every ``every`` tokens of the prompts read so far, so that a prompt is read from where it is new.

        prefixes = PrefixCache(model)
        model.generate(tokens, past_key_values=prefixes.read(tokens))

    The longest stored prefix of a prompt is found by a hash of its tokens. The states take at most ``max_bytes``; those
    used longest ago are dropped first. After a change of the weights, call :meth:`clear`.
    """

    def __init__(self, model: Any, every: int = 256, max_bytes: int = 2**28) -> None:
        if every < 1 or max_bytes < 1:
            raise ValueError(f"every and max_bytes must be at least 1, got {every} and {max_bytes}")
        self.model = model
        self.every = every
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._states: OrderedDict[bytes, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def clear(self) -> None:
        self._states.clear()
        self.num_bytes = 0

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Any:
        """A cache after all but the last of ``tokens`` [1, T], which ``generate`` reads itself.

        The tokens are read in pieces of ``every``, whether some are stored or none: the result is the same.
        """
        if tokens.dim() != 2 or tokens.shape[0] != 1:
            raise ValueError(f"tokens must have shape [1, T], got {list(tokens.shape)}; read one prompt at a time")
        keys = self._keys(tokens[0, :-1])
        known = next((i for i in range(len(keys), 0, -1) if keys[i - 1] in self._states), 0)
        cache = DynamicCache(config=self.model.config)
        if known:
            self._states.move_to_end(keys[known - 1])
            cache = fork(self._states[keys[known - 1]])
        for number, piece in enumerate(tokens[:, :-1].split(self.every, dim=1)):
            if number >= known and piece.shape[1]:
                self.model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
                if number < len(keys):
                    self._store(keys[number], fork(cache))
        return cache

    def _keys(self, tokens: Tensor) -> list[bytes]:
        """A hash of each prefix whose length is a multiple of ``every``."""
        digest, keys = hashlib.sha256(), []
        for piece in tokens.cpu().long().split(self.every):
            digest.update(piece.numpy().tobytes())
            keys.append(digest.digest())
        return keys[: len(tokens) // self.every]

    def _store(self, key: bytes, cache: Any) -> None:
        self._states[key] = cache
        self.num_bytes += _num_bytes(cache)
        while self.num_bytes > self.max_bytes:
            _, dropped = self._states.popitem(last=False)
            self.num_bytes -= _num_bytes(dropped)


def _fields(layer: Any) -> tuple[str, str]:
    return ("conv", "memory") if isinstance(layer, LinearAttentionLayer) else ("keys", "values")


def _tensors(cache: Cache) -> dict[str, Tensor]:
    """What a cache holds, by layer and name; empty before the first token."""
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        pair: Any
        if isinstance(layer, LinearAttentionLayer):
            pair = (layer.conv_states[0], layer.recurrent_states[0]) if layer.has_previous_state[0] else None
        elif type(layer) is DynamicLayer:
            pair = (layer.keys, layer.values) if layer.is_initialized else None
        else:
            raise ValueError(
                f"layer {index} of the cache is a {type(layer).__name__}; only the state in a "
                "DynamicCache(config=model.config) can be saved, forked and merged"
            )
        if pair is not None:
            found.update(zip((f"layers.{index}.{name}" for name in _fields(layer)), pair, strict=True))
    return found


def _filled_tensors(cache: Cache, purpose: str) -> dict[str, Tensor]:
    tensors = _tensors(cache)
    if not tensors:
        raise ValueError(f"the cache has read nothing yet; there is no state to {purpose}. Run the model on it first")
    return tensors


def _num_bytes(cache: Cache) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(cache).values())


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps({**header, "sha256": ""}, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _read(file: Path, device: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and tensors of a file, after its checksum was compared."""
    try:
        with safe_open(file, framework="pt") as opened:  # type: ignore[no-untyped-call]
            header: dict[str, str] = opened.metadata() or {}
            if header.get("format") != _FORMAT:
                raise ValueError(f"{file} is no state that efla.state.save wrote (format {_FORMAT})")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); save the state again, or copy the file again") from error
    if header.get("sha256") != _checksum(header, tensors):
        raise ValueError(f"{file} was changed after it was saved; save the state again, or copy the file again")
    return header, {name: tensor.to(device) for name, tensor in tensors.items()}
