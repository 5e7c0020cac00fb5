"""Bad input gets an error that says what was expected, what came and what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import efla
from efla.errors import LayoutWarning
from efla.testing import make_inputs
from tests.scans.cases import BACKENDS


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
    "chunk of 17": (dict(chunk_size=17), r"chunk_size must be one of .*, got 17"),
    "scale of nan": (dict(scale=float("nan")), r"scale must be a finite number, got nan; leave it out"),
    "infinite scale": (dict(scale=float("inf")), r"scale must be a finite number, got inf"),
    "norm by name": (dict(qk_l2norm="x"), r"qk_l2norm must be True, False, 'q' or 'k', got 'x'"),
    "rule by position": (dict(log_gate="efla"), r"log_gate must be a torch.Tensor, got str; write rule='efla'"),
    "state by position": (dict(beta=[0.5]), r"beta must be a torch.Tensor, got list"),
    "state of another kind": (dict(initial_state=0), r"initial_state must be a torch.Tensor, got int"),
    "unknown backend": (dict(backend="chunky"), r"unknown backend 'chunky'; did you mean 'chunked'"),
}  # fmt: skip


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case, grad):
    changes, message = BAD[case]
    with torch.set_grad_enabled(grad), pytest.raises((ValueError, TypeError), match=message):
        call(**changes)


def head_major(heads=6, length=20):
    inputs = make_inputs("efla", length=length, key_heads=heads, value_heads=heads)
    return [x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v, inputs.beta)]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("function", ["linear_attention", "scan", "ops"])
def test_more_heads_than_tokens_are_questioned(function, grad):
    q, k, v, beta = head_major()
    calls = {
        "linear_attention": lambda: efla.linear_attention(q, k, v, beta),
        "scan": lambda: efla.scan(q, k, v, None, beta, beta),
        "ops": lambda: efla.ops.chunk_delta_rule(q, k, v, beta),
    }
    with (
        torch.set_grad_enabled(grad),
        pytest.warns(LayoutWarning, match=r"6 tokens, fewer than its 20 heads.*transpose"),
    ):
        calls[function]()


def test_a_short_prompt_of_a_layer_and_a_single_token_are_not_questioned():
    """In a fresh process: pytest's own filters would hide ours."""
    code = """
import torch, warnings, efla
from efla.layers import LinearAttention
with torch.no_grad():
    LinearAttention(64, num_heads=8, head_dim=8)(torch.randn(1, 3, 64))
    x = torch.randn(1, 1, 8, 8)
    efla.linear_attention(x, x, x, torch.rand(1, 1, 8))
    print("quiet", flush=True)
    x = torch.randn(1, 3, 8, 8)
    for _ in range(2):
        efla.linear_attention(x, x, x, torch.rand(1, 3, 8))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert "quiet" in done.stdout, done.stderr
    assert done.stderr.strip().endswith("pass x.transpose(1, 2)"), done.stderr


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


@pytest.mark.parametrize("name", ["log_decay", "erase", "write"])
def test_scan_names_the_scalar_of_another_shape(name):
    inputs = make_inputs("efla", length=8)
    scalars = dict.fromkeys(("log_decay", "erase", "write"), -inputs.beta) | {name: inputs.beta[:, :7]}
    with pytest.raises(ValueError, match=rf"^{name} must have shape \[B, T, H\] = \[2, 8, 2\]"):
        efla.scan(inputs.q, inputs.k, inputs.v, **scalars)


def test_value_checks_can_be_switched_off():
    with efla.validation("off"):
        call(beta=torch.full((2, 8, 2), -0.25))
    with pytest.raises(ValueError, match="beta must be"):
        call(beta=torch.full((2, 8, 2), -0.25))
    with pytest.raises(ValueError, match="unknown validation level 'of'"):
        efla.set_validation("of")


def test_values_on_an_accelerator_are_looked_at_only_when_asked():
    """What has a device but is no tensor of the CPU stands in for one of a GPU, which must not be synchronised."""
    from types import SimpleNamespace

    from efla.scans import validation

    elsewhere = SimpleNamespace(device=torch.device("cuda"), is_meta=False)
    assert not validation.checks_values(elsewhere)
    with efla.validation("full"):
        assert validation.checks_values(elsewhere)
        assert not validation.checks_values(torch.empty(2, 8, 2, device="meta"))


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_auto_logs_its_choice_once(caplog, grad):
    from efla.scans import backends

    backends.log_choice.cache_clear()
    with caplog.at_level("INFO", logger="efla"), torch.set_grad_enabled(grad):
        call()
        call()
    assert [r.message.partition(" (")[0] for r in caplog.records] == [f"backend '{BACKENDS[0]}' runs scans on cpu"]
