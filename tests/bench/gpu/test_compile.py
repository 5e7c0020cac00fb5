"""Kernels compiled for GPUs that are not here, and the traffic counted from their launches."""

from __future__ import annotations

import importlib.util

import pytest

from efla.bench.gpu.compile import compile_kernels
from efla.bench.gpu.target import TARGETS
from efla.bench.gpu.traffic import count_traffic
from efla.cli import main

IS_INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("fla", "triton"))
pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(
        not IS_INSTALLED, reason="needs flash-linear-attention and triton; `make test-gpu-sim` installs them"
    ),
]


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_fits(target):
    ((_, _, kernels),) = compile_kernels((target,), (128,), "bfloat16")
    assert {kernel.launch for kernel in kernels if kernel.problem is None} == {kernel.launch for kernel in kernels}
    fitting = {(kernel.operation, kernel.kernel) for kernel in kernels if kernel.problem is None}
    # Both directions of the costliest operation, our own kernels before it, and the recurrent forms are among them.
    names = {name for _, name in fitting}
    assert {"chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64", "scale_kernel", "scale_backward_kernel"} <= names
    assert {operation for operation, _ in fitting} >= {"chunk_comba", "chunk_delta_rule", "fused_recurrent_comba"}
    assert all(kernel.registers > 0 for kernel in kernels if kernel.problem is None)


def test_packed_sequences_with_states_compile_too():
    ((_, _, kernels),) = compile_kernels(("sm_90",), (64,), "float16", packed=True)
    assert not [kernel for kernel in kernels if kernel.problem is not None]


def test_efla_moves_the_bytes_of_deltanet_and_little_more():
    traffic = {row.rule: row for row in count_traffic((128,))}
    delta, efla = traffic["delta"], traffic["efla"]
    # The same kernels; the squared norms' gradient reads and writes the keys once more.
    assert efla.forward_kernels == delta.forward_kernels
    assert 0 < efla.backward_kernels - delta.backward_kernels <= 2 * 2 * 128 + 16
    assert efla.training / delta.training < 1.15


def test_the_command_prints_tables_and_writes_a_file(tmp_path, capsys):
    path = tmp_path / "check.json"
    assert main(["gpu-check", "--steps", "traffic", "--widths", "64", "--output", str(path)]) == 0
    assert "| efla " in capsys.readouterr().out
    assert '"forward_kernels"' in path.read_text()
