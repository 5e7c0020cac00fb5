"""Two float64 runs of one computation, its sums in another order: how far apart may they be, on any CPU?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from efla.testing import assert_close


def assert_same_but_rounding(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], single: Mapping[str, Tensor]
) -> None:
    """Float64 results agree within :func:`efla.testing.assert_close`, whose honest run is ``single``, a float32 run of the same.

    The error of ``single`` shows how much the computation enlarges rounding; float64 rounds 2^29 times finer.
    """
    finer = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    honest = {name: truth + (single[name] - truth) * finer for name, truth in expected.items()}
    assert_close(actual, expected, honest)
