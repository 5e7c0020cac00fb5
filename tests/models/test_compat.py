"""Where versions of transformers differ, efla finds the same. ``make test-floor`` runs this on the lowest and on the newest."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from efla.models.compat import cached_states
from tests.models.tiny import HYBRID, random_tokens, tiny_model


@torch.no_grad()
def test_cached_states_are_the_layer_s_own_and_none_before_the_first_token_and_after_a_reset():
    model = tiny_model(**HYBRID)
    cache = DynamicCache(config=model.config)
    assert cached_states(cache, 0) == (None, None)
    model(random_tokens(2, 9), past_key_values=cache)
    found, layer = cached_states(cache, 0), cache.layers[0]
    assert found[0] is layer.conv_states[0] and found[1] is layer.recurrent_states[0]
    if hasattr(cache, "get_recurrent_state"):
        assert found[0] is cache.get_conv_state(0) and found[1] is cache.get_recurrent_state(0)
    with pytest.raises(ValueError, match="on layer index 3, but this layer is an"):
        cached_states(cache, 3)
    cache.reset()
    assert cached_states(cache, 0) == (None, None)
