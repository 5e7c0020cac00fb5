"""Bad input gets an error that says what was expected, what came and what to do."""

from __future__ import annotations

import pytest
import torch

import efla
from efla.testing import make_inputs


def call(rule="efla", **changes):
    inputs = make_inputs(rule, length=8, key_dim=4, value_dim=4)
    arguments = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "beta": inputs.beta, "log_gate": inputs.log_gate}
    return efla.linear_attention(**(arguments | changes), rule=rule)


BAD = {
    "heads first": (dict(beta=torch.rand(2, 2, 8)), r"beta must have shape .* = \[2, 8, 2\].*got \[2, 2, 8\].*token-major"),
    "three axes": (dict(q=torch.rand(2, 8, 8)), r"q must have 4 dimensions"),
    "q of another width": (dict(q=torch.rand(2, 8, 2, 5)), r"q must have k's shape"),
    "v of another length": (dict(v=torch.rand(2, 9, 2, 4)), r"v must have k's batch and length"),
    "three heads over two": (dict(v=torch.rand(2, 8, 3, 4)), r"multiple of k's 2 heads, got 3"),
    "integers": (dict(v=torch.ones(2, 8, 2, 4, dtype=torch.int64)), r"v must be floating point"),
    "mixed dtypes": (dict(v=torch.rand(2, 8, 2, 4).bfloat16()), r"one dtype"),
    "not a tensor": (dict(q=[1, 2]), r"q must be a torch.Tensor, got list"),
    "another device": (dict(q=torch.empty(2, 8, 2, 4, device="meta")), r"one device"),
    "no beta": (dict(beta=None), r"rule 'efla' needs beta"),
    "negative beta": (dict(beta=torch.full((2, 8, 2), -0.25)), r"beta must be >= 0, got -0.25; pass it through a sigmoid"),
    "superfluous gate": (dict(log_gate=torch.zeros(2, 8, 2)), r"rule 'efla' takes no log_gate.*use rule 'gated_efla'"),
    "empty heads": (dict(v=torch.rand(2, 8, 0, 4)), r"multiple of k's 2 heads, got 0"),
    "short state": (dict(initial_state=torch.rand(1, 2, 4, 4)), r"initial_state must have shape .* = \[2, 2, 4, 4\]"),
    "half state": (dict(initial_state=torch.rand(2, 2, 4, 4).bfloat16()), r"initial_state must be float32 or float64"),
    "odd chunk": (dict(chunk_size=48), r"chunk_size must be one of 16, 32, 64, 128, 256, got 48"),
    "packed batch of two": (dict(cu_seqlens=torch.tensor([0, 8])), r"B must be 1, got 2"),
    "unknown backend": (dict(backend="chunky"), r"unknown backend 'chunky'; did you mean 'chunked'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    changes, message = BAD[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call(**changes)


def test_a_gated_rule_without_its_gate():
    with pytest.raises(ValueError, match=r"rule 'gated_efla' needs log_gate of shape \[B, T, H\] = \[2, 8, 2\]"):
        call("gated_efla", log_gate=None)


def test_a_positive_log_gate():
    with pytest.raises(ValueError, match=r"log_gate must be <= 0 .* got 0.5; pass it through logsigmoid"):
        call("gated_delta", log_gate=torch.full((2, 8, 2), 0.5))


def test_linear_takes_no_beta():
    with pytest.raises(ValueError, match=r"rule 'linear' takes no beta"):
        call("linear", beta=torch.rand(2, 8, 2))


@pytest.mark.parametrize("borders", [[0, 5], [1, 8], [0, 6, 4, 8], [0, 9, 8]], ids=str)
def test_packed_borders_that_make_no_sense(borders):
    inputs = make_inputs("efla", batch=1, length=8)
    with pytest.raises(ValueError, match=r"cu_seqlens must start at 0, never decrease and end at T = 8"):
        efla.linear_attention(inputs.q, inputs.k, inputs.v, inputs.beta, cu_seqlens=torch.tensor(borders))


def test_float_borders():
    inputs = make_inputs("efla", batch=1, length=8)
    with pytest.raises(TypeError, match=r"cu_seqlens must be an int32 or int64 tensor, got torch.float32"):
        efla.linear_attention(inputs.q, inputs.k, inputs.v, inputs.beta, cu_seqlens=torch.tensor([0.0, 8.0]))


def test_scan_rejects_a_growing_memory():
    inputs = make_inputs("efla", length=8)
    with pytest.raises(ValueError, match=r"log_decay must be <= 0, got 0.1"):
        efla.scan(inputs.q, inputs.k, inputs.v, torch.full((2, 8, 2), 0.1), inputs.beta, inputs.beta)


def test_value_checks_can_be_switched_off():
    with efla.validation("off"):
        call(beta=torch.full((2, 8, 2), -0.25))
    with pytest.raises(ValueError, match="beta must be"):
        call(beta=torch.full((2, 8, 2), -0.25))
    with pytest.raises(ValueError, match="unknown validation level 'of'"):
        efla.set_validation("of")


def test_values_on_an_accelerator_are_looked_at_only_when_asked():
    """A device that can show shapes but no values stands in for a GPU that must not be synchronised."""
    from efla.scans import validation

    elsewhere = torch.empty(2, 8, 2, device="meta")
    assert not validation.checks_values(elsewhere)
    with efla.validation("full"):
        assert validation.checks_values(elsewhere)


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_auto_logs_its_choice_once(caplog, grad):
    from efla.scans import backends

    backends.log_choice.cache_clear()
    with caplog.at_level("INFO", logger="efla"), torch.set_grad_enabled(grad):
        call()
        call()
    assert len([r for r in caplog.records if "runs scans on cpu" in r.message]) == 1
