"""The oracle itself: against the equation written with dense matrices, and its two backward passes against each other."""

from __future__ import annotations

import pytest
import torch

from efla import rules
from efla.scans.backends import reference
from efla.scans.request import ScanRequest
from efla.testing import make_inputs
from tests.scans.cases import RULES


@pytest.mark.parametrize("rule", RULES)
def test_reference_is_the_equation_with_dense_matrices(rule):
    inputs = make_inputs(rule, length=12, key_heads=1, value_heads=2, initial_state=True, dtype=torch.float64)
    o, final = inputs.call("reference")
    lam = (inputs.k**2).sum(-1).expand(-1, -1, 2)
    log_decay, erase, write = rules.get(rule).coefficients(inputs.beta, lam, inputs.log_gate)
    for b in range(2):
        for h in range(2):
            state = inputs.initial_state[b, h]
            for t in range(12):
                k = inputs.k[b, t, 0]
                transition = log_decay[b, t, h].exp() * (torch.eye(16) - erase[b, t, h] * torch.outer(k, k))
                state = transition @ state + write[b, t, h] * torch.outer(k, inputs.v[b, t, h])
                torch.testing.assert_close(o[b, t, h], state.T @ inputs.q[b, t, 0] / 4, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(final[b, h], state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("packed", [None, [3, 0, 9]], ids=["dense", "packed"])
def test_the_adjoint_recurrence_equals_autograd(packed):
    inputs = make_inputs("gated_efla", length=12, value_heads=4, packed=packed, initial_state=True, dtype=torch.float64)
    log_decay, erase, write = rules.get("gated_efla").coefficients(
        inputs.beta, (inputs.k**2).sum(-1).repeat_interleave(2, 2), inputs.log_gate
    )
    leaves = [
        x.detach().requires_grad_()
        for x in (inputs.q, inputs.k, inputs.v, log_decay, erase, write, inputs.initial_state)
    ]
    q, k, v, log_decay, erase, write, initial_state = leaves
    request = ScanRequest(
        q=q, k=k, v=v, log_decay=log_decay, erase=erase, write=write, scale=0.3, initial_state=initial_state,
        cu_seqlens=inputs.cu_seqlens, chunk_size=64,
    )  # fmt: skip
    result = reference.forward(request)
    grad_o, grad_state = torch.randn_like(result.o), torch.randn_like(result.final_state)
    expected = torch.autograd.grad((result.o, result.final_state), leaves, (grad_o, grad_state))
    with torch.no_grad():
        got = reference.backward(request, result.saved, grad_o, grad_state)
    found = {name: value for name, value in got._asdict().items() if value is not None}
    for (name, value), truth in zip(found.items(), expected, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-11, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
