"""Keeping freed memory in the process, for commands that allocate the same large tensors over and over."""

from __future__ import annotations

import ctypes
import sys

# Numbers of glibc's mallopt parameters.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_MIB = 2**20


def keep_freed_memory() -> bool:
    """Tell glibc to keep up to 2 GiB of freed memory for the next allocation; false where there is no glibc.

    By default it gives large freed blocks back to the system and asks for them again at once, and the system fills every
    page with zeros anew: a training step on tensors of tens of megabytes can spend a third of its time so. For the
    whole process, hence for commands and workers of ours only, never on import.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = ((_MMAP_THRESHOLD, 32 * _MIB), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * _MIB))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
