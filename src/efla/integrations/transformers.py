"""Fast CPU kernels for the gated-delta-rule models inside transformers: Qwen3-Next, Qwen3.5, OLMo-hybrid and others.

    from efla.integrations.transformers import accelerate_cpu
    accelerate_cpu()                     # or: with accelerate_cpu(): ...

On a CPU these models fall back to slow plain-torch functions. The layers look the functions up in their module at every
call; :func:`accelerate_cpu` replaces them by functions that run ``native`` for CPU tensors and call the original otherwise.

Packed sequences (``DataCollatorWithFlattening``), which transformers rejects or mixes on a CPU, stay separate in every
layer. ``cu_seq_lens_q``, ``seq_idx`` or ``position_ids`` say where they start.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from efla.models.inputs import boundaries_of_positions, boundaries_of_starts, find_packing, positions_of_packed
from efla.native import rows
from efla.scans.api import linear_attention
from efla.scans.validation import checks_values

FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
CONVOLUTION = "causal_conv1d_fn"
_INPUTS = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache")


class Acceleration:
    """The replaced functions; :meth:`restore`, or leaving the ``with`` block, puts the originals back."""

    def __init__(self) -> None:
        self._originals: list[tuple[ModuleType | type, str, Callable[..., Any]]] = []

    @property
    def models(self) -> list[str]:
        """Names of the model families whose layers now run on ``native``."""
        return sorted({owner.__name__.split(".")[-2] for owner, name, _ in self._originals if name in FUNCTIONS})

    def restore(self) -> None:
        """Put transformers' own functions back."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def _replace(
        self, owner: ModuleType | type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        original = getattr(owner, name, None)
        if not callable(original) or hasattr(original, "__efla_original__"):
            return
        replacement = functools.wraps(original)(make(original))
        replacement.__efla_original__ = original  # type: ignore[attr-defined]
        setattr(owner, name, replacement)
        self._originals.append((owner, name, original))


def accelerate_cpu() -> Acceleration:
    """Run transformers' gated-delta-rule models on efla's CPU kernels; warns if it finds no function to replace.

    Calling it twice changes nothing. ``restore()`` on the first call's result, or leaving its ``with`` block, undoes it.
    """
    acceleration = Acceleration()
    found = False
    for module in _gated_delta_modules():
        found = True
        for name in FUNCTIONS:
            acceleration._replace(module, name, _rule_on_cpu)
        acceleration._replace(module, CONVOLUTION, _convolution_on_cpu)
        for model in _text_models(module):
            acceleration._replace(model, "forward", _with_packing)
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


def _text_models(module: ModuleType) -> list[type]:
    """The classes that run a family's layers: those that make the mask of its recurrent layers."""
    found = []
    for value in vars(module).values():
        forward = vars(value).get("forward") if inspect.isclass(value) and value.__module__ == module.__name__ else None
        if forward is None or tuple(inspect.signature(forward).parameters)[1:7] != _INPUTS:
            continue
        if "create_recurrent_attention_mask" in inspect.unwrap(forward).__code__.co_names:
            found.append(value)
    return found


def _runs_here(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_exporting()


def _rule_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
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
        if args or not _runs_here(query):
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
        inputs, shape = (query, key, value, beta, g), value.shape
        if cu_seqlens is not None:
            if output_final_state or initial_state is not None:
                raise ValueError("packed sequences take no cache; pass use_cache=False and no past_key_values")
            inputs = tuple(x.flatten(0, 1)[None] for x in inputs)  # type: ignore[assignment]
        o, state = linear_attention(
            *inputs,
            rule="gated_delta",
            initial_state=None if initial_state is None else initial_state.float(),
            output_final_state=output_final_state,
            qk_l2norm=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
        )
        return o.view(shape), state

    return gated_delta_rule


def _convolution_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """For packed sequences, a convolution that does not reach over a boundary."""

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is None or not _runs_here(hidden_states):
            return original(hidden_states, weight, bias, activation=activation, **kwargs)  # type: ignore[no-any-return]
        x = hidden_states.to(weight.dtype).transpose(1, 2)  # [B, T, C]
        is_silu = activation in ("silu", "swish")
        arguments = x.flatten(0, 1)[None], weight, bias, None, cu_seqlens, is_silu
        y = rows.causal_conv(*arguments)
        y = (rows.torch_conv(*arguments) if y is None else y).view(x.shape)
        if activation is not None and not is_silu:
            y = ACT2FN[activation](y)
        return y.transpose(1, 2).to(hidden_states.dtype)

    return causal_conv1d_fn


def _with_packing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the recurrent layers where packed sequences start, and the softmax layers by positions."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(_INPUTS, args, strict=False))
        embeddings = kwargs.get("inputs_embeds")
        tokens = kwargs.get("input_ids") if embeddings is None else embeddings
        if tokens is not None and _runs_here(tokens):
            B, T = tokens.shape[:2]
            cu_seqlens = _packing_of(B, T, kwargs)
            if cu_seqlens is not None:
                _check_layers_keep_apart(self.config)
                # With a cache, transformers does not keep the sequences apart in softmax layers.
                kwargs.update(cu_seq_lens_q=cu_seqlens, use_cache=False)
                kwargs.pop("seq_idx", None)
                if kwargs.get("position_ids") is None:
                    kwargs["position_ids"] = positions_of_packed(cu_seqlens, B, T)
        return original(self, *args[len(_INPUTS) :], **kwargs)

    return forward


def _check_layers_keep_apart(config: Any) -> None:
    """Refuse a model with layers that mix the tokens of neighbouring sequences and cannot be told where one starts."""
    mixing = set(config.layer_types) - {"linear_attention", "full_attention", "sliding_attention"}
    if getattr(config, "ple_layer_ids", None):
        mixing.add("per-layer embedding (ple_layer_ids)")
    if mixing:
        raise ValueError(
            f"layers of type {', '.join(sorted(mixing))} run over the boundaries of packed sequences; "
            "pad the sequences or pass them one at a time"
        )


def _packing_of(batch_size: int, length: int, kwargs: dict[str, Any]) -> Tensor | None:
    """Boundaries [N + 1] in the flattened [B * T] axis, from the arguments of a model's forward; ``None`` without packing."""
    seq_idx, given, position_ids = (kwargs.get(name) for name in ("seq_idx", "cu_seq_lens_q", "position_ids"))
    if given is None and seq_idx is not None:
        is_start = torch.ones_like(seq_idx, dtype=torch.bool)
        is_start[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        given = boundaries_of_starts(is_start)
    text_positions = position_ids
    if position_ids is not None and position_ids.dim() == 3:  # text, time, height and width, or the last three alone
        text_positions = position_ids[0] if position_ids.shape[0] == 4 else None
    if given is not None and position_ids is not None and checks_values(given):
        said = None if text_positions is None else boundaries_of_positions(text_positions, batch_size, length)
        if said is None or not torch.equal(given.unique(), said):
            raise ValueError(
                "position_ids must restart at each boundary of packed sequences that cu_seq_lens_q or seq_idx gives, and "
                "nowhere else, because the mask of the softmax layers is made from them; leave position_ids out to have them "
                "counted"
            )
    mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
    return find_packing(mask, text_positions, cache, given, batch_size, length, kwargs)
