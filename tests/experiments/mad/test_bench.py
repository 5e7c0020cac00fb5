"""The benchmark of a MAD training step compares backends that compute the same; no time is asserted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from efla.bench import BACKENDS, PLAIN, kernel_contenders
from efla.experiments.mad import bench as mad
from efla.experiments.mad.bench import stepper
from efla.experiments.mad.config import profile
from efla.scans.backends import native

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=f"backend 'native' {native.unavailable()}")


def test_the_bound_counts_a_step_s_matrix_products_and_not_its_scan() -> None:
    a, b = torch.randn(6, 5, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    assert mad._matrix_flops(lambda: torch.autograd.grad((a @ b).sum(), (a, b))) == 3 * 2 * 6 * 5 * 7
    assert mad._matrix_flops(mad.scan_call("native")) == 0
    config, batch = profile("full"), 2
    step = stepper(config, config.setting("in-context-recall", "baseline"), "exact-flow", batch)
    mixer, feed_forward, head = 4 * 128 * 128 + 4 * 128, 3 * 128 * 352, 16 * 128  # weights of the linear maps
    assert mad._matrix_flops(step) == 3 * 2 * (batch * 127) * (2 * mixer + 2 * feed_forward + head)


def test_a_timed_step_is_a_training_step_and_the_backends_agree_on_it() -> None:
    torch.use_deterministic_algorithms(False)
    config = profile("quick")
    setting = config.setting("in-context-recall", "short")
    steps = {name: stepper(replace(config, backend=b), setting, "exact-flow", 4) for name, b in BACKENDS.items()}
    losses = {name: [step() for _ in range(4)] for name, step in kernel_contenders(steps).items()}
    assert losses["native"][-1] < losses["native"][0]
    assert losses["native"] == pytest.approx(losses["chunked"], rel=1e-4)
    assert losses["native"] == pytest.approx(losses[PLAIN], rel=1e-4)
