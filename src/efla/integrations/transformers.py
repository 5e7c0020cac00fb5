"""Fast CPU kernels for the gated-delta-rule models inside transformers: Qwen3-Next, Qwen3.5, OLMo-hybrid and their kin.

    from efla.integrations.transformers import accelerate_cpu
    accelerate_cpu()                     # or: with accelerate_cpu(): ...

On a CPU these models fall back to plain-torch functions that transformers itself calls much slower. The layers look those
functions up in their module at every call; here they are replaced by ones that run ``native`` for CPU tensors and hand
everything else to the original.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor

from efla.scans.api import linear_attention

FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


class Acceleration:
    """The replaced functions, to be put back by :meth:`restore` or at the end of a ``with`` block."""

    def __init__(self) -> None:
        self._originals: list[tuple[ModuleType, str, Callable[..., Any]]] = []

    @property
    def models(self) -> list[str]:
        """Names of the model families whose layers now run on ``native``."""
        return sorted({module.__name__.split(".")[-2] for module, _, _ in self._originals})

    def restore(self) -> None:
        """Put transformers' own functions back."""
        while self._originals:
            module, name, original = self._originals.pop()
            setattr(module, name, original)

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def _replace(self, module: ModuleType, name: str) -> None:
        original = getattr(module, name)
        if getattr(original, "__efla_original__", None) is not None:
            return
        setattr(module, name, _on_cpu(original))
        self._originals.append((module, name, original))


def accelerate_cpu() -> Acceleration:
    """Let transformers' gated-delta-rule models run on efla's kernels on the CPU; a warning if none of them has the hook.

    Calling it twice changes nothing. ``restore()`` on the first call's result, or leaving its ``with`` block, undoes it.
    """
    acceleration = Acceleration()
    found = False
    for module in _gated_delta_modules():
        found = True
        for name in FUNCTIONS:
            if callable(getattr(module, name, None)):
                acceleration._replace(module, name)
    if not found:
        warnings.warn(
            "efla found no gated-delta-rule model with a replaceable function in this transformers; nothing was changed",
            stacklevel=2,
        )
    return acceleration


@functools.cache
def _gated_delta_modules() -> list[ModuleType]:
    """Modelling modules of transformers that define the functions, found by reading their source, then imported."""
    import transformers.models

    modules = []
    for folder in transformers.models.__path__:
        for path in sorted(Path(folder).glob("*/modeling_*.py")):
            source = path.read_text(encoding="utf-8")
            if any(f"\ndef {name}(" in source for name in FUNCTIONS):
                modules.append(importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"))
    return modules


def _on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *args: Any,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if args or query.device.type != "cpu" or torch.compiler.is_exporting():
            return original(  # type: ignore[no-any-return]
                query,
                key,
                value,
                g,
                beta,
                *args,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                cu_seqlens=cu_seqlens,
                **kwargs,
            )
        return linear_attention(
            query,
            key,
            value,
            beta,
            g,
            rule="gated_delta",
            initial_state=None if initial_state is None else initial_state.float(),
            output_final_state=output_final_state,
            qk_l2norm=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
        )

    gated_delta_rule.__efla_original__ = original  # type: ignore[attr-defined]
    return gated_delta_rule
