"""Errors that say what was expected, what came and what to do."""

import difflib
import importlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any


class BackendUnavailable(RuntimeError):
    """A backend was asked for by name and cannot run the call; the message says why and what to use instead."""


class LayoutWarning(UserWarning):
    """Inputs look head-major, [B, H, T, D], where token-major ones are expected."""


# Our layers use the right layout, and prompts with fewer tokens than heads are common there.
warnings.filterwarnings("ignore", category=LayoutWarning, module=r"efla\.(layers|train|integrations)")


def unknown_name(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """An error for an unknown name that offers the nearest known ones."""
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return ValueError(f"unknown {kind} {name!r}; {hint}known {kind}s: {', '.join(known)}")


def check_names(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise :func:`unknown_name` for the first of ``names`` that is not known."""
    known = list(known)
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)


def import_optional(module: str, missing: str) -> Any:
    """A module of an optional package; without it, an error with the message ``missing``, which says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise RuntimeError(missing) from None


def refuse_ignored(given: Mapping[str, bool], where: str) -> None:
    """An error if options were given that would do nothing. given: option's name -> whether it was."""
    names = [f"--{name}" for name, is_given in given.items() if is_given]
    if names:
        raise ValueError(
            f"{', '.join(names)} would do nothing {where}; leave {'it' if len(names) == 1 else 'them'} out"
        )
