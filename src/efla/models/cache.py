"""States in and out of transformers' cache, how many tokens it has seen, and how the last of them are taken back.

The cache is transformers' own (``DynamicCache(config=config)``, or any other it makes from ``config.layer_types``).
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import index, itemgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from efla.layers.attention import MixerState, Projected
from efla.models.compat import cached_states

REWINDABLE = 64
"""At least so many of the last tokens can be taken back after ``cache.activate_past_recording()``."""
_SEGMENT = 16  # single tokens between two copies of the state
_SEEN, _MODEL = "_efla_seen_tokens", "_efla_model"


def read_state(cache: Cache | None, layer_idx: int, batch_size: int) -> MixerState | None:
    """The state that the layer left in the cache, or ``None`` before the first token."""
    if cache is None:
        return None
    conv, memory = cached_states(cache, layer_idx)
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


def write_state(layer: Any, state: MixerState) -> None:
    """Put a state into a layer of the cache. A mixer without convolutions writes one zero: the cache expects a state."""
    conv = state.memory.new_zeros(state.memory.shape[0], 1, 1) if state.conv is None else state.conv
    if layer.conv_states[0] is not conv:
        layer.update_conv_state(conv)
    if layer.recurrent_states[0] is not state.memory:  # else it was updated in place
        layer.update_recurrent_state(state.memory)


def seen_tokens(cache: Cache | None) -> int:
    """Number of tokens the cache has seen."""
    if cache is None:
        return 0
    if not _is_all_recurrent(cache):
        return int(cache.get_seq_length())
    return int(getattr(cache, _SEEN, None) or 0) if cache.has_previous_state() else 0


def is_empty(cache: Cache | None) -> bool:
    """Whether the cache has seen no token; unlike their number, known without reading a tensor."""
    return cache is None or not (cache.has_previous_state() if any(cache.is_linear) else cache.get_seq_length())


def count_tokens(cache: Cache | None, num_tokens: int) -> None:
    """Add ``num_tokens`` to the number of tokens seen: a tensor, because compiled code is compiled again for another int."""
    if cache is not None and _is_all_recurrent(cache):
        seen = getattr(cache, _SEEN, None)
        if seen is None:
            layer: Any = cache.layers[0]
            seen = layer.recurrent_states[0].new_zeros((), dtype=torch.int64)
        setattr(cache, _SEEN, seen + num_tokens)


def _is_all_recurrent(cache: Cache) -> bool:
    return len(cache.layers) > 0 and all(cache.is_linear)


def add_methods(cache: Cache | None) -> None:
    """Give a cache with recurrent layers its own ``get_seq_length`` and ``crop``, which ``generate`` calls.

    transformers keeps the length in attention layers and raises without one; its ``crop`` cannot rewind a memory.
    """
    if cache is None or torch.compiler.is_compiling() or "crop" in vars(cache) or not any(cache.is_linear):
        return
    vars(cache)["crop"] = MethodType(_crop, cache)
    if _is_all_recurrent(cache):
        vars(cache)["get_seq_length"] = MethodType(_get_seq_length, cache)


def _get_seq_length(cache: Any, layer_idx: int = 0) -> int:
    return seen_tokens(cache)


def _crop(cache: Any, tokens_to_remove: int) -> None:
    """Take back the last tokens; ``tokens_to_remove`` is minus their number, as in transformers."""
    count = -index(tokens_to_remove)
    if count < 0:
        raise ValueError(f"crop takes minus the number of tokens to take back, got {tokens_to_remove}")
    if count == 0:
        return
    for layer, is_linear in zip(cache.layers, cache.is_linear, strict=True):  # before anything is changed
        known = layer.rewindable if isinstance(layer, RewindableLayer) else 0
        if is_linear and known < count:
            raise ValueError(
                f"cannot take back {count} tokens: the log of the recurrent layers holds {known}. It is kept after "
                f"cache.activate_past_recording(), for at least the last {REWINDABLE} tokens; take back or draft fewer, or "
                "go on from a copy made before them (efla.state.fork)"
            )
    type(cache).crop(cache, -count)
    count_tokens(cache, -count)


@dataclass
class _Segment:
    """The state before some tokens, and what the mixer's input maps made of them, call by call."""

    before: MixerState | None
    calls: list[tuple[Projected, Tensor | None]]
    length: int


class RewindableLayer(LinearAttentionLayer):  # type: ignore[misc]
    """transformers' cache of a recurrent layer, with a log of the last tokens.

    ``crop(-n)`` goes back to a copy of the state and repeats the kernel calls on what they were given, without the last n
    tokens: bit for bit the state if those had not been there.
    """

    is_croppable = True

    def __init__(self, plain: LinearAttentionLayer, mixer: nn.Module) -> None:
        super().__init__(plain.number_of_states)
        vars(self).update(vars(plain))
        self.record_past = False  # transformers' own log, of the convolutions alone
        self.mixer = weakref.ref(mixer)
        self.segments: list[_Segment] = []

    def activate_past_recording(self) -> None:
        """Nothing to do: the layer records."""

    @property
    def rewindable(self) -> int:
        """How many tokens can be taken back now."""
        return sum(segment.length for segment in self.segments)

    def record(self, mask: Tensor | None, state: MixerState | None, projected: Projected) -> None:
        """Log the tokens that a mixer is about to read from ``state``.

        A call of several tokens, as the check of a draft is, starts from a copy of the state; single tokens share one.
        """
        length = _length(projected)
        if length > 1 or not self.segments or self.segments[-1].length >= _SEGMENT:
            if len(self.segments) > 1 and self.segments[-2].length + self.segments[-1].length <= _SEGMENT:
                last = self.segments.pop()  # its copy of the state is near the one before
                self.segments[-1].calls += last.calls
                self.segments[-1].length += last.length
            copied = None if state is None else MixerState(*_each(lambda x: x.detach().clone(), state))  # type: ignore[arg-type]
            self.segments.append(_Segment(copied, [], 0))
        self.segments[-1].calls.append((_each(Tensor.detach, projected), mask))
        self.segments[-1].length += length
        while len(self.segments) > 1 and self.rewindable - self.segments[0].length >= REWINDABLE:
            del self.segments[0]

    @torch.no_grad()
    def crop(self, tokens_to_remove: int) -> None:
        count = -tokens_to_remove
        segment = self.segments.pop()
        while segment.length < count:
            count -= segment.length
            segment = self.segments.pop()
        self._restore(segment.before)
        left = segment.length - count
        calls = []
        for projected, mask in segment.calls if left else []:
            length = min(left, _length(projected))
            if length < _length(projected):
                projected = _each(itemgetter((slice(None), slice(length))), projected)
                mask = None if mask is None or bool(mask[:, :length].all()) else mask[:, :length]
            if length:
                self._advance(projected, mask)
                calls.append((projected, mask))
            left -= length
        if calls:
            self.segments.append(_Segment(segment.before, calls, segment.length - count))

    def _advance(self, projected: Projected, mask: Tensor | None) -> None:
        mixer: Any = self.mixer()
        if mixer is None:
            raise ValueError("the model that filled the cache is gone; keep it while tokens are to be taken back")
        memory = self.recurrent_states[0]
        state = None if memory is None else MixerState(self.conv_states[0], memory)
        write_state(self, mixer.advance(projected, mask, state))

    def _restore(self, state: MixerState | None) -> None:
        if state is not None:
            write_state(self, state)
            return
        for states in (self.conv_states, self.recurrent_states):  # as before the first token
            states[0] = None
        for known in (self.is_conv_states_initialized, self.is_recurrent_states_initialized, self.has_previous_state):
            known[0] = False

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        self.segments = []

    def reset(self) -> None:
        super().reset()
        self.segments = []


def _length(projected: Projected) -> int:
    return 0 if projected[0] is None else projected[0].shape[1]


def _each(change: Callable[[Tensor], Tensor], tensors: tuple[Tensor | None, ...]) -> Projected:
    return tuple(None if x is None else change(x) for x in tensors)


def recording_layer(cache: Cache | None, layer_idx: int, mixer: nn.Module) -> RewindableLayer | None:
    """The layer of a cache that keeps a log, made on the first call after ``cache.activate_past_recording()``."""
    layer: Any = None if cache is None else cache.layers[layer_idx]
    if cache is not None and getattr(layer, "record_past", False):
        layer = cache.layers[layer_idx] = RewindableLayer(layer, mixer)
    return layer if isinstance(layer, RewindableLayer) else None


def adopt(cache: Cache, model: nn.Module, layer_types: list[str]) -> None:
    """Reject a cache that was made for another kind of model, such as ``DynamicCache()`` without a config.

    Any other knows from now on which model fills it, and has the methods of :func:`add_methods`.
    """
    expected = [kind == "linear_attention" for kind in layer_types]
    if any(expected) and cache.is_linear != expected:
        raise ValueError(
            f"the cache has {len(cache.layers)} layers that do not match the model's {len(layer_types)}; "
            "make it with DynamicCache(config=model.config)"
        )
    if all(expected) and not cache.has_previous_state():
        setattr(cache, _SEEN, None)  # after cache.reset()
    if not torch.compiler.is_compiling():
        setattr(cache, _MODEL, weakref.ref(model))
    add_methods(cache)


def model_of(cache: Cache) -> Any:
    """The model that filled the cache, ``None`` if it is gone or none of ours."""
    return getattr(cache, _MODEL, lambda: None)()


def cached_state_bytes(cache: Cache) -> int:
    """Bytes of all recurrent states in the cache (attention layers' keys and values not counted)."""
    states: list[Tensor | None] = []
    for layer_idx, is_linear in enumerate(cache.is_linear):
        if is_linear:
            states += cached_states(cache, layer_idx)
    return sum(x.numel() * x.element_size() for x in states if x is not None)


def why_not_recurrent(model: Any) -> str | None:
    """Why the model cannot carry a state of constant size over any number of windows, or ``None`` if it can."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds and all(kind == "linear_attention" for kind in kinds):
        return None
    if kinds and "linear_attention" in kinds:
        return "some of its layers are softmax attention, whose positions end where training ended"
    return "its layers are softmax attention, whose positions end where training ended, or not known to be recurrent"
