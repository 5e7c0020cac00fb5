"""Exact Flow Linear Attention: linear-time attention whose memory update solves the delta rule's equation exactly."""

from __future__ import annotations

from efla import ops, rules
from efla.errors import BackendUnavailable
from efla.phi import phi1
from efla.scans.api import linear_attention, scan
from efla.scans.backends import backends
from efla.scans.validation import set_validation, validation

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "backends",
    "linear_attention",
    "ops",
    "phi1",
    "rules",
    "scan",
    "set_validation",
    "validation",
]
