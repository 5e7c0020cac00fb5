"""flash-linear-attention's own function on CPU tensors, by efla's backend in its registry."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import efla
from efla import testing

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(
        importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None,
        reason="needs flash-linear-attention and triton; `make test-gpu-sim` installs them beside the project",
    ),
]


@pytest.fixture
def chunk_gated_delta_rule(monkeypatch):
    from fla import backends
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from efla.integrations.fla import register

    registry = backends._operation_registries["gated_delta_rule"]
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    register()
    return chunk_gated_delta_rule


@pytest.fixture
def inputs():
    return testing.make_inputs("gated_delta", batch=2, length=70, key_heads=2, value_heads=4, key_dim=16, value_dim=24)


def test_cpu_tensors_run_on_our_kernels(chunk_gated_delta_rule, inputs):
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    o, state = chunk_gated_delta_rule(
        q, k, v, inputs.log_gate, inputs.beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    expected, final = efla.linear_attention(
        q, k, v, inputs.beta, inputs.log_gate, rule="gated_delta", qk_l2norm=True, output_final_state=True
    )
    assert torch.equal(o, expected) and torch.equal(state, final)
    o.sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))


def test_packed_sequences_and_positional_arguments(chunk_gated_delta_rule, inputs):
    flat = [x.flatten(0, 1)[None] for x in (inputs.q, inputs.k, inputs.v, inputs.log_gate, inputs.beta)]
    o, _ = chunk_gated_delta_rule(*flat, 0.5, cu_seqlens=torch.tensor([0, 70, 140]))
    expected, _ = chunk_gated_delta_rule(inputs.q, inputs.k, inputs.v, inputs.log_gate, inputs.beta, 0.5)
    assert torch.equal(o.view_as(expected), expected)


def test_the_environment_switches_it_off(chunk_gated_delta_rule, monkeypatch):
    from fla import backends

    ours = backends._operation_registries["gated_delta_rule"]._backends["efla"]
    assert ours.is_enabled()
    monkeypatch.setenv("FLA_EFLA", "0")
    assert not ours.is_enabled()
