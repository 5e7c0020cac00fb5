"""The backends by name, and the choice among them. A new backend is one file and one entry of ``_BACKENDS``."""

import logging
from functools import cache

import torch
from torch import Tensor

from efla.errors import BackendUnavailable, unknown_name
from efla.phi import forward_mode
from efla.scans.backends import chunked, fla, native, reference
from efla.scans.request import Backend, FastPath

# In the order in which "auto" tries them; the reference supports everything and comes last.
_BACKENDS = {module.BACKEND.name: module.BACKEND for module in (native, fla, chunked, reference)}

_logger = logging.getLogger("efla")


def backends() -> dict[str, str | None]:
    """Each backend's name, with ``None`` if it can run on this machine, else the reason why not."""
    return {name: backend.unavailable() for name, backend in _BACKENDS.items()}


def get_backend(name: str) -> Backend:
    if name not in _BACKENDS:
        raise unknown_name("backend", name, ["auto", *_BACKENDS])
    return _BACKENDS[name]


def fast_path(name: str) -> tuple[str, FastPath] | None:
    """A backend's name and its one call for plain inference; for "auto", those of the first backend that has one.

    The call returns ``None`` where the general path must run it or report an error.
    """
    return _FAST_PATHS.get(name)


def choose_backend(name: str, k: Tensor, v: Tensor, dtype: torch.dtype) -> Backend:
    """The named backend, or for "auto" the first that supports a call computed in ``dtype``.

    A named backend never falls back.
    """
    if name != "auto":
        backend = get_backend(name)
        reason = _why_not(backend, k, v, dtype)
        if reason is not None:
            others = [repr(other) for other, it in _BACKENDS.items() if _why_not(it, k, v, dtype) is None]
            raise BackendUnavailable(f"backend {name!r} {reason}; use backend='auto' or one of {', '.join(others)}")
        return backend
    passed_over: list[str] = []
    for candidate, backend in _BACKENDS.items():
        reason = _why_not(backend, k, v, dtype)
        if reason is None:
            if not torch.compiler.is_compiling():
                log_choice(candidate, k.device.type, "; ".join(passed_over))
            return backend
        passed_over.append(f"{candidate!r} {reason}")
    raise AssertionError("the reference backend supports every call")


def _why_not(backend: Backend, k: Tensor, v: Tensor, dtype: torch.dtype) -> str | None:
    if forward_mode() and not backend.own_autograd:
        return "has no forward-mode derivative (torch.func.jvp, dual tensors)"
    return backend.unavailable() or backend.supports(k, v, dtype)


@cache
def log_choice(name: str, device: str, passed_over: str = "") -> None:
    """Log once which backend "auto" chose on a device, and why not those before it."""
    _logger.info("backend %r runs scans on %s%s", name, device, f" ({passed_over})" if passed_over else "")


_FAST_PATHS = {name: (name, backend.decode) for name, backend in _BACKENDS.items() if backend.decode is not None}
_FAST_PATHS["auto"] = next(iter(_FAST_PATHS.values()))
