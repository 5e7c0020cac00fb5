"""What differs between the versions of transformers that efla supports; no other module depends on the version."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache


def cached_states(cache: Cache, layer_idx: int) -> tuple[Tensor | None, Tensor | None]:
    """State of the convolutions and memory of a recurrent layer; ``None`` before the first token and after a reset.

    transformers has ``Cache.get_conv_state`` and ``Cache.get_recurrent_state`` from 5.21 on.
    """
    if not cache.has_previous_state(layer_idx, state_idx=0):
        return None, None
    layer: Any = cache.layers[layer_idx]
    return layer.conv_states[0], layer.recurrent_states[0]


# Names that the forward of Qwen3.5's mixer uses in some versions only. They do nothing that the decoding kernels leave out.
OLDER_GATED_DELTA_NET = frozenset({
    "conv_states", "has_previous_state", "layers", "record_past", "recurrent_states",  # before 5.21: the cache, by its fields
    "num_k_heads", "num_v_heads", "repeat_interleave",  # before 5.23: keys of grouped values, which the kernel need not repeat
})  # fmt: skip
