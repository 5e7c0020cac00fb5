"""What gpu-check is made of, as far as it needs neither a GPU nor Triton."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from efla import testing
from efla.bench.gpu import conformance, report, run_module, throughput
from efla.bench.gpu.compile import CompiledKernel, _Recorder, parse_amdgcn, parse_cuobjdump, requests
from efla.bench.gpu.target import TARGETS, get_target
from efla.bench.gpu.traffic import Traffic, total_bytes
from efla.cli import main

KERNEL = CompiledKernel(
    launch=1, target="gfx942", width=256, dtype="bfloat16", operation="chunk_comba", kernel="state_kernel", config="BV 32",
    warps=2, stages=2, shared=4096, registers=100, spilled=0, seconds=1.0, problem=None,
)  # fmt: skip


def test_without_the_package_the_command_names_the_extra(capsys, monkeypatch):
    monkeypatch.setattr("efla.scans.backends.fla.missing", "needs flash-linear-attention: pip install 'efla[gpu]'")
    assert main(["gpu-check"]) == 1
    assert "efla[gpu]" in capsys.readouterr().err


def test_bad_arguments_are_explained(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("efla.scans.backends.fla.missing", None)
    assert main(["gpu-check", "--targets", "sm_9"]) == 1
    assert "did you mean 'sm_90'" in capsys.readouterr().err
    (tmp_path / "there.json").write_text("precious")
    assert main(["gpu-check", "--output", str(tmp_path / "there.json")]) == 1
    assert (tmp_path / "there.json").read_text() == "precious"


def test_resources_are_read_from_both_vendors_listings():
    nvidia = "Function state_kernel:\n  REG:255 STACK:72 SHARED:0 LOCAL:0 CONSTANT[0]:640 TEXTURE:0"
    assert parse_cuobjdump(nvidia) == (255, 72)
    amd = "    .vgpr_count:     373\n    .vgpr_spill_count: 3\n"
    assert parse_amdgcn(amd) == (373, 12)
    with pytest.raises(ValueError, match="names no registers"):
        parse_cuobjdump("cuobjdump fatal")
    with pytest.raises(ValueError, match="names no registers"):
        parse_amdgcn("")


def test_what_does_not_fit_is_said():
    amd = get_target("gfx942")
    assert replace(KERNEL, warps=4, shared=65536, registers=512).excess(amd) is None
    assert "shared memory 65,540 > 65,536" in replace(KERNEL, shared=65540).excess(amd)
    assert "registers 130,560 > 65,536" in replace(KERNEL, warps=16, shared=0, registers=255).excess(TARGETS["sm_90"])


def test_a_compiled_kernel_is_printed_once_and_a_compiler_error_is_a_result(capsys):
    recorder = _Recorder(get_target("gfx942"), 64, "bfloat16")
    recorder.operation, recorder.launch = "chunk_delta_rule", 3
    kernel = SimpleNamespace(
        asm={"amdgcn": ".vgpr_count: 373\n.vgpr_spill_count: 3\n"},
        metadata=SimpleNamespace(num_warps=4, num_stages=2, shared=70000),
    )

    def fail():
        raise RuntimeError("no such intrinsic")

    assert not recorder.compile(fail, lambda: kernel, "BV 64") and not recorder.compile(fail, lambda: kernel, "again")
    assert not recorder.compile(fail, fail, "BV 32")
    big, broken = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert big.pop("seconds") >= 0 and broken.pop("seconds") >= 0
    known = {"launch": 3, "target": "gfx942", "width": 64, "dtype": "bfloat16", "operation": "chunk_delta_rule"}
    used = {"warps": 4, "stages": 2, "shared": 70000, "registers": 373, "spilled": 12}
    known["kernel"] = "fail"
    assert big == {**known, "config": "BV 64", **used, "problem": "shared memory 70,000 > 65,536 bytes"}
    assert broken == {
        **known,
        "config": "BV 32",
        **dict.fromkeys(used, 0),
        "problem": "RuntimeError: no such intrinsic",
    }


def test_a_kernel_that_fits_in_another_configuration_is_fine(capsys):
    too_big = replace(KERNEL, config="BV 64", shared=69632, problem="shared memory 69,632 > 65,536 bytes")
    assert report.kernels(Console(soft_wrap=True), [too_big, KERNEL], verbose=True)
    assert "69,632 > 65,536" in capsys.readouterr().out
    another_launch = replace(KERNEL, launch=2)
    assert not report.kernels(Console(soft_wrap=True), [too_big, another_launch], verbose=False)
    assert "fits in no configuration on gfx942 at width 256" in capsys.readouterr().out


def test_bytes_are_counted_once_per_tensor():
    x = torch.zeros(10, dtype=torch.bfloat16)
    assert total_bytes([x, x, torch.zeros(3), "BV", 7, None]) == 20 + 12


def test_the_roofline_is_bandwidth_over_bytes(capsys):
    rows = [Traffic(rule, "chunk_delta_rule", 128, 5000, 500, 10000, 500) for rule in ("delta", "efla")]
    assert rows[0].training_bound("A100 80 GB SXM") == pytest.approx(2.039e12 / 16000)
    report.traffic(Console(soft_wrap=True), [rows[0], replace(rows[1], backward_around=4500.0)])
    assert "1.25" in capsys.readouterr().out


def test_every_operation_is_compiled_in_training_and_in_decoding():
    from efla.scans.backends.fla.operations import choose_operation

    made = list(requests(64, torch.bfloat16, packed=False))
    names = {choose_operation(request, differentiable).name for request, differentiable in made}
    assert len(made) == 10
    assert names >= {"chunk_simple_gla", "chunk_delta_rule", "chunk_gated_delta_rule", "chunk_comba"}
    assert any(name.startswith("fused_recurrent") for name in names)
    packed = [request for request, differentiable in requests(64, torch.float16, packed=True) if differentiable]
    assert all(r.cu_seqlens.tolist() == [0, 128, 256] and r.initial_state.shape == (2, 4, 64, 64) for r in packed)


def test_a_failing_process_is_reported_with_its_command():
    with pytest.raises(RuntimeError, match=r"efla\.bench\.gpu\.compile no-target 64 bfloat16 failed"):
        run_module("efla.bench.gpu.compile", "no-target", "64", "bfloat16")


@pytest.mark.parametrize("rule", ["linear", "ssd", "efla", "gated_efla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_low_precision_reference_is_the_recurrence_with_its_roundings(rule, dtype):
    """Close to the oracle, or its budget would be a blank cheque; not exact in half precision, or it would be none."""
    for arguments in (
        {"packed": [1, 0, 70], "initial_state": True},
        {"length": 40, "value_heads": 4, "qk_l2norm": True},
    ):
        inputs = testing.make_inputs(rule, dtype=dtype, key_dim=8, value_dim=8, **arguments)
        reference, expected = testing.run(inputs, testing.low_precision_reference), testing.oracle(inputs)
        unit = torch.finfo(dtype).eps
        errors = {name: testing.deviation(reference[name], truth, truth).error for name, truth in expected.items()}
        assert max(errors.values()) < (60 if dtype == torch.float32 else 4) * unit
        assert dtype == torch.float32 or errors["grad_k"] > unit / 16


def test_the_conformance_check_sees_a_wrong_gradient():
    inputs = testing.make_inputs("gated_efla", length=70, batch=1, dtype=torch.bfloat16)
    assert all(found.is_within for found in conformance.check_case(inputs, backend="chunked").values())

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 1.05 * grad

    def call(inputs):
        return replace(inputs, v=Wrong.apply(inputs.v)).call("chunked")

    found = conformance.check_case(inputs, backend=call)
    assert {name for name, deviation in found.items() if not deviation.is_within} == {"grad_v"}


def test_the_grid_measures_every_rule_and_work():
    grid = list(
        throughput.run_grid(
            "cpu", widths=(16,), lengths=(64,), tokens=128, model_width=32, rounds=1, backend="chunked",
            dtype=torch.float32,
        )
    )  # fmt: skip
    assert {row.work for row in grid} == {"forward", "training", "decoding"}
    assert len(grid) == 3 * len(throughput.RULES)
    assert all(row.million_tokens > 0 for row in grid)
    assert all(row.against_delta == 1 for row in grid if row.rule == "delta")
    report.throughput(Console(), grid)


def test_a_wrong_case_is_reported(capsys):
    right = conformance.CaseResult("efla", "packed", 64, "bfloat16", "grad_k", 1e-3, 4e-3)
    skipped = conformance.CaseResult("efla", "packed", 64, "float32", skipped="would multiply in TF32")
    wrong = conformance.CaseResult("delta", "packed", 64, "bfloat16", "grad_k", 1.0, 4e-3, problem="grad_k: error 1.0")
    assert report.conformance(Console(soft_wrap=True), [right, skipped])
    assert "would multiply in TF32" in capsys.readouterr().out
    assert not report.conformance(Console(soft_wrap=True), [right, wrong])
    assert "WRONG" in capsys.readouterr().out
