"""flash-linear-attention's names give the rules they stand for."""

from __future__ import annotations

import pytest
import torch

import efla
from efla.testing import make_inputs

CASES = [
    (form + suffix, rule)
    for form in ("chunk_", "fused_recurrent_")
    for suffix, rule in [
        ("delta_rule", "delta"), ("gated_delta_rule", "gated_delta"), ("efla", "efla"), ("gated_efla", "gated_efla"),
    ]
]  # fmt: skip


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_the_function_is_the_rule(name, rule):
    inputs = make_inputs(rule, length=30, packed=[10, 20], initial_state=True, qk_l2norm=True)
    gates = [] if inputs.log_gate is None else [inputs.log_gate]
    got = getattr(efla.ops, name)(
        inputs.q, inputs.k, inputs.v, *gates, inputs.beta, scale=0.3, initial_state=inputs.initial_state,
        output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=inputs.cu_seqlens,
    )  # fmt: skip
    expected = efla.linear_attention(
        inputs.q, inputs.k, inputs.v, inputs.beta, inputs.log_gate, rule=rule, scale=0.3,
        initial_state=inputs.initial_state, output_final_state=True, qk_l2norm=True, cu_seqlens=inputs.cu_seqlens,
    )  # fmt: skip
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_no_state_unless_asked():
    inputs = make_inputs("delta", length=5)
    assert efla.ops.chunk_delta_rule(inputs.q, inputs.k, inputs.v, inputs.beta)[1] is None


def test_a_misspelt_argument_is_an_error():
    inputs = make_inputs("delta", length=5)
    with pytest.raises(TypeError, match="use_qk_l2norm"):
        efla.ops.chunk_delta_rule(inputs.q, inputs.k, inputs.v, inputs.beta, use_qk_l2norm=True)
