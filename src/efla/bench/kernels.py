"""The contenders that differ only in which kernels they run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from efla.native import rows
from efla.runs.timing import Contender

PLAIN = "chunked, no compiled kernels"
BACKENDS = {"native": "native", "chunked": "chunked", PLAIN: "chunked"}
"""Backend of each contender. ``chunked`` has the compiled norms, convolutions and gates too; ``PLAIN``, which is what runs
where the extension was not built, has nothing compiled."""


def contenders(calls: Mapping[str, Callable[[], object]]) -> list[Contender]:
    """One contender per name of ``BACKENDS``; the call of ``PLAIN`` runs without the compiled kernels."""
    return [Contender(name, rows.without_kernels()(call) if name == PLAIN else call) for name, call in calls.items()]
