"""When the fla backend is chosen, why it is not, and which operation it takes; needs neither a GPU nor the package."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import efla
from efla.scans.backends import choose_backend, fla
from efla.scans.backends.fla import operations
from efla.scans.request import ScanRequest


def gpu_tensors(dtype=torch.bfloat16, key_width=64, device="cuda"):
    """k and v as if on a GPU: shapes, dtypes and a device, no memory."""
    with FakeTensorMode():
        return tuple(torch.empty(1, 100, 2, width, dtype=dtype, device=device) for width in (key_width, 64))


@pytest.fixture
def gpu_machine(monkeypatch):
    """A machine with a GPU and flash-linear-attention, as far as the choice of a backend goes."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    monkeypatch.setattr(fla, "missing", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("device", ["cuda", "xpu"])
@pytest.mark.usefixtures("gpu_machine")
def test_auto_prefers_it_on_a_gpu(device):
    assert choose_backend("auto", *gpu_tensors(device=device), torch.float32).name == "fla"


def test_auto_takes_chunked_on_a_gpu_without_the_package(monkeypatch):
    monkeypatch.setattr(fla, "missing", "needs flash-linear-attention")
    assert choose_backend("auto", *gpu_tensors(), torch.float32).name == "chunked"


@pytest.mark.usefixtures("gpu_machine")
def test_auto_never_takes_it_on_the_cpu():
    k, v = torch.zeros(2, 1, 100, 2, 64)
    assert choose_backend("auto", k, v, torch.float32).name != "fla"


@pytest.mark.parametrize(
    ("tensors", "dtype", "reason"),
    [
        ({"device": "cpu"}, torch.float32, "runs on CUDA, ROCm and XPU devices (k is on cpu)"),
        ({"dtype": torch.float64}, torch.float64, "computes in float32"),
        ({}, torch.float64, "computes in float32"),  # bfloat16 inputs with a float64 state
        ({"key_width": 257}, torch.float32, "key widths up to 256 (K = 257)"),
        ({"dtype": torch.float32}, torch.float32, "TF32"),
    ],
)
@pytest.mark.usefixtures("gpu_machine")
def test_what_it_does_not_take_is_said(tensors, dtype, reason):
    assert reason in fla.supports(*gpu_tensors(**tensors), dtype)
    with pytest.raises(efla.BackendUnavailable, match="use backend='auto'"):
        choose_backend("fla", *gpu_tensors(**tensors), dtype)


@pytest.mark.usefixtures("gpu_machine")
def test_float32_is_taken_when_tf32_is_accepted_or_ruled_out(monkeypatch):
    tensors = gpu_tensors(dtype=torch.float32)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert fla.supports(*tensors, torch.float32) is None
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    assert fla.supports(*tensors, torch.float32) is None


@pytest.mark.parametrize(("version", "is_fine"), [("0.6.0", True), ("0.6.3", True), ("0.5.9", False), ("0.7.0", False)])
def test_the_tested_versions(version, is_fine):
    problem = fla.version_problem(version)
    if is_fine:
        assert problem is None
    else:
        assert version in problem
        assert "pip install" in problem


def test_a_missing_package_is_named_with_the_extra_to_install(monkeypatch):
    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'efla[gpu]'" in fla._missing()


def test_another_package_named_fla_is_told_apart_without_triton(monkeypatch):
    def version(name):
        raise fla.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: True if name == "fla" else None)
    monkeypatch.setattr(fla.importlib.metadata, "version", version)
    assert "the installed package 'fla' is something else" in fla._missing()


def test_without_a_gpu_the_reason_is_that(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(fla, "missing", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    assert "needs a CUDA, ROCm or XPU device" in efla.backends()["fla"]


def request(*, decay, erase, dtype=torch.bfloat16, length=100, key_heads=2, packed=None):
    q, k = torch.zeros(2, 1, length, key_heads, 16, dtype=dtype)
    v = torch.zeros(1, length, 2, 16, dtype=dtype)
    log_decay, other, write = torch.zeros(3, 1, length, 2)
    return ScanRequest(
        q=q, k=k, v=v, log_decay=log_decay if decay else None, write=write,
        erase={"none": None, "write": write, "other": other}[erase],
        scale=1.0, initial_state=None, cu_seqlens=packed, chunk_size=64,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "operation"),
    [
        ({"decay": False, "erase": "none"}, "chunk_simple_gla"),
        ({"decay": True, "erase": "none"}, "chunk_simple_gla"),
        ({"decay": False, "erase": "write"}, "chunk_delta_rule"),
        (
            {"decay": False, "erase": "write", "key_heads": 1},
            "chunk_gated_delta_rule",
        ),  # the delta rule takes no groups
        ({"decay": False, "erase": "write", "dtype": torch.float32}, "chunk_gated_delta_rule"),  # nor float32
        ({"decay": True, "erase": "write"}, "chunk_gated_delta_rule"),
        ({"decay": True, "erase": "other"}, "chunk_comba"),
        ({"decay": False, "erase": "other"}, "chunk_comba"),
    ],
)
def test_each_request_has_its_operation(arguments, operation, monkeypatch):
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    assert operations.choose_operation(request(**arguments), differentiable=True).name == operation


def test_short_sequences_without_gradients_are_run_token_by_token():
    chosen = operations.choose_operation
    assert chosen(request(decay=True, erase="other", length=64), False).name == "fused_recurrent_comba"
    assert chosen(request(decay=True, erase="other", length=65), False).name == "chunk_comba"
    assert chosen(request(decay=True, erase="other", length=64), True).name == "chunk_comba"
    packed = torch.tensor([0, 50, 100])
    assert chosen(request(decay=False, erase="write", length=100, packed=packed), False).recurrent


@pytest.mark.parametrize("rule", ["efla", "delta", "rk4", "gated_delta"])
def test_rules_that_write_what_they_erase_pass_one_tensor(rule, monkeypatch):
    """Which the backend's choice rests on; two equal tensors would take the dearer operation."""
    seen = []
    monkeypatch.setattr(
        "efla.scans.api.run", lambda request, *_, **__: seen.append(request) or (request.v, request.initial_state)
    )
    q, k, v = torch.randn(3, 1, 10, 2, 4)
    beta = torch.rand(1, 10, 2)
    efla.linear_attention(q, k, v, beta, -beta if rule == "gated_delta" else None, rule=rule, backend="chunked")
    efla.scan(q, k, v, None, beta.double(), beta.double(), backend="chunked")
    shared = beta.double()
    efla.scan(q, k, v, None, shared, shared, backend="chunked")
    assert [operations.is_one_tensor(request.erase, request.write) for request in seen] == [True, False, True]


def test_nothing_optional_is_imported_on_the_cpu():
    code = (
        "import sys, torch, efla; q, k, v = torch.randn(3, 1, 70, 2, 300); "
        "efla.linear_attention(q, k, v, torch.rand(1, 70, 2)); efla.backends(); "
        "print([name for name in ('fla', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
