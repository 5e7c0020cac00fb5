"""Long sequences: every backend against one run of the slow oracle."""

from __future__ import annotations

import pytest

from efla.testing import make_inputs
from tests.scans.cases import assert_all_match

SHAPE = {"batch": 1, "key_heads": 1, "value_heads": 1, "key_dim": 8, "value_dim": 8}


@pytest.mark.parametrize("rule", ["delta", "efla", "gated_efla"])
def test_one_key_repeated_4096_times(rule):
    assert_all_match(make_inputs(rule, kind="repeated_key", length=4096, **SHAPE))


@pytest.mark.parametrize("rule", ["efla", "gated_efla"])
def test_sixteen_thousand_tokens(rule):
    assert_all_match(make_inputs(rule, length=16_384, **SHAPE))
