"""Fast CPU kernels for the gated-delta-rule models inside transformers: Qwen3-Next, Qwen3.5, OLMo-hybrid and others.

    from efla.integrations.transformers import accelerate_cpu
    accelerate_cpu()                     # or: with accelerate_cpu(): ...

    from efla.integrations.transformers import register
    register()                           # needs the kernels package; then model.set_use_kernels(True) or use_kernels=True

On a CPU these models fall back to slow plain-torch functions. :func:`accelerate_cpu` replaces the functions, norms and
feed-forward layers in transformers' modules: CPU tensors run on ``native``, all others take the original. :func:`register`
offers the same functions and norms to transformers' own kernel registry, which chooses them model by model.

Packed sequences (``DataCollatorWithFlattening``), which transformers rejects or mixes on a CPU, stay separate in every
layer. ``cu_seq_lens_q``, ``seq_idx`` or ``position_ids`` say where they start; the registry needs ``cu_seq_lens_q``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN, SiLUActivation

from efla import rules
from efla.layers.blocks import SwiGLU
from efla.layers.linear import apply_linear, is_plain, plain_weights
from efla.models.inputs import boundaries_of_positions, boundaries_of_starts, find_packing, positions_of_packed
from efla.native import rows
from efla.scans.api import linear_attention
from efla.scans.backends import native
from efla.scans.validation import checks_values

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
    for owner, name, make in _replacements():
        acceleration._replace(owner, name, make)
    if not _replacements():
        warnings.warn(
            "efla found no gated-delta-rule model with a replaceable function in this transformers; nothing was changed",
            stacklevel=2,
        )
    return acceleration


def accelerate_model(model: nn.Module) -> Acceleration:
    """:func:`accelerate_cpu` if the model is one of transformers' gated-delta-rule models, else an empty acceleration."""
    module = sys.modules[type(model).__module__]
    return accelerate_cpu() if FUNCTIONS.keys() & vars(module).keys() else Acceleration()


def register() -> None:
    """Offer efla's CPU kernels to transformers' registry, for training and inference, with and without ``torch.compile``.

    ``model.set_use_kernels(True)``, or ``use_kernels=True`` in ``from_pretrained``, then takes them for a model on a CPU.
    """
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        low, high = (getattr(import_utils, f"KERNELS_{end}_VERSION", None) for end in ("MIN", "MAX"))
        raise ImportError(
            f"transformers' registry needs the kernels package, {low} <= version < {high} for this transformers; "
            "install it, or use accelerate_cpu(), which needs no package"
        )
    from kernels import Mode, register_kernel_mapping

    modes = Mode.TRAINING | Mode.TORCH_COMPILE, Mode.INFERENCE | Mode.TORCH_COMPILE
    register_kernel_mapping({name: {"cpu": dict.fromkeys(modes, repo)} for name, repo in _repositories().items()})


class _Repository:
    """What the registry asks for a kernel: ``load`` returns the module class whose forward is taken."""

    def __init__(self, name: str, forward: Callable[..., Any]) -> None:
        self._layer = type(name, (nn.Module,), {"forward": forward, "can_torch_compile": True, "has_backward": True})

    def load(self) -> type[nn.Module]:
        return self._layer


@functools.cache
def _repositories() -> dict[str, _Repository]:
    """By the names that transformers' layers ask for."""
    forwards: dict[str, Callable[..., Any]] = {
        "RMSNorm": rms_norm,
        "RMSNormZeroCentered": rms_norm_zero_centered,
        "RMSNormGated": rms_norm_gated,
    }
    for name, function in FUNCTIONS.items():
        forwards[_REGISTERED.get(name, name)] = _as_forward(function)
    return {name: _Repository(name, forward) for name, forward in forwards.items()}


def _as_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module that stands for a function; the original is the forward of the module's class."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(functools.partial(type(self).forward, self), *args, **kwargs)

    forward.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return forward


@functools.cache
def _replacements() -> list[tuple[ModuleType | type, str, Callable[[Callable[..., Any]], Callable[..., Any]]]]:
    """What :func:`accelerate_cpu` replaces: the owner, the name, and what makes the new function of the original."""
    found: list[tuple[ModuleType | type, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = []
    for module in _gated_delta_modules():
        found += [(module, name, functools.partial(_call_with_original, f)) for name, f in FUNCTIONS.items()]
        for owner in [value for value in vars(module).values() if inspect.isclass(value)]:
            if method := _LAYERS.get(_names_used(owner)):
                found.append((owner, "forward", functools.partial(_call_on_cpu, method)))
            elif {"in_proj_qkv", "causal_conv1d_update"} <= _names_used(owner) <= _GATED_DELTA_NET:
                found.append((owner, "forward", _with_decoding))
        found += [(model, "forward", _with_packing) for model in _text_models(module)]
    return found


def _gated_delta_modules() -> list[ModuleType]:
    """Modelling modules of transformers that define the functions, found by reading their source, then imported."""
    import transformers.models

    modules = []
    for folder in transformers.models.__path__:
        for path in sorted(Path(folder).glob("*/modeling_*.py")):
            if "\ndef torch_chunk_gated_delta_rule(" in path.read_text(encoding="utf-8"):
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


def _call_with_original(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(original, *args, **kwargs)


def _call_on_cpu(method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, x: Tensor, *args: Tensor, **kwargs: Tensor) -> Any:
        return (method if _runs_here(x) else original)(self, x, *args, **kwargs)

    return forward


# Functions, with the signatures of transformers' own behind ``original``, which takes what does not run here.


def chunk_gated_delta_rule(
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if not _runs_here(query):
        kwargs |= {"initial_state": initial_state, "output_final_state": output_final_state, "chunk_size": chunk_size}
        return original(query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kwargs)  # type: ignore[no-any-return]
    inputs, shape, cu_seqlens = (query, key, value, beta, g), value.shape, kwargs.get("cu_seqlens")
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
        # A cached token: the layer reads the cache's state and writes the new one there.
        inplace_state=query.shape[1] == 1 and not torch.is_grad_enabled(),
    )
    return o.view(shape), state


def fused_recurrent_gated_delta_rule(
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    def without_chunks(*args: Any, chunk_size: int, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    kwargs |= {"initial_state": initial_state, "output_final_state": output_final_state}
    kwargs["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
    return chunk_gated_delta_rule(without_chunks, query, key, value, g, beta, **kwargs)


def causal_conv1d_fn(
    original: Callable[..., Any],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """[B, C, T], which is a view of [B, T, C]; no window crosses a boundary in ``cu_seq_lens_q``."""
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if _runs_here(hidden_states):
        x = hidden_states.to(weight.dtype).transpose(1, 2)
        is_silu = activation in ("silu", "swish")
        arguments = x if cu_seqlens is None else x.flatten(0, 1)[None], weight, bias, None, cu_seqlens, is_silu
        y = rows.causal_conv(*arguments)
        if y is None and cu_seqlens is not None:
            y = rows.torch_conv(*arguments)
        if y is not None:
            if activation is not None and not is_silu:
                y = ACT2FN[activation](y)
            return y.view(x.shape).transpose(1, 2).to(hidden_states.dtype)
    return original(hidden_states, weight, bias, activation=activation, **kwargs)  # type: ignore[no-any-return]


def causal_conv1d_update(
    original: Callable[..., Any],
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """One token: [B, C, 1]. conv_state [B, C, W] takes it in place of the oldest."""
    if not _runs_here(hidden_states) or hidden_states.shape[2] != 1 or conv_state.shape[2] != weight.shape[1]:
        return original(hidden_states, conv_state, weight, bias, activation)  # type: ignore[no-any-return]
    window = torch.cat([conv_state[..., 1:], hidden_states], dim=-1)
    conv_state.copy_(window)
    wide = rows.wider(weight)
    y = (window.to(wide) * weight.to(wide)).sum(-1, keepdim=True)
    y = y if bias is None else y + bias[:, None]
    return (y if activation is None else ACT2FN[activation](y)).to(hidden_states.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule,
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
}
_REGISTERED = {
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
}


# Forwards of layers, with transformers' parameters on ``self``.


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return rows.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def rms_norm_zero_centered(self: Any, x: Tensor) -> Tensor:
    return rows.rms_norm(x, 1.0 + self.weight.to(rows.wider(x)), self.eps)


def rms_norm_gated(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    y = rows.rms_norm(hidden_states, self.weight, self.variance_epsilon)
    if self.activation in ("silu", "swish") and gate.dtype == y.dtype:
        return rows.swiglu(gate, y)
    return (y * ACT2FN[self.activation](gate.to(rows.wider(gate)))).to(y.dtype)


def swiglu_mlp(self: Any, x: Tensor) -> Tensor:
    if isinstance(self.act_fn, (nn.SiLU, SiLUActivation)):
        return SwiGLU.forward(self, x)
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def _with_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    """A token after a cached state by one kernel between the products; everything else by the original."""

    def forward(
        self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        if hidden_states.shape[1] == 1 and cache_params is not None and attention_mask is None:
            y = _decode(self, hidden_states, cache_params) if kwargs.get("cu_seq_lens_q") is None else None
            if y is not None:
                return y
        return original(self, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)

    return forward


def _decode(self: Any, x: Tensor, cache: Any) -> Tensor | None:
    """The output [B, 1, d] of a layer with Qwen3.5's parameters; ``None`` where the kernels do not apply."""
    conv_state, memory = cache.get_conv_state(self.layer_idx), cache.get_recurrent_state(self.layer_idx)
    maps = [getattr(self, name, None) for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")]
    weights = None if memory is None or None in maps else plain_weights(maps, x.dtype)
    if (
        weights is None
        or getattr(cache.layers[self.layer_idx], "record_past", False)
        or not (is_plain(self.conv1d, nn.Conv1d) and is_plain(self.norm, type(self.norm)))
        or self.conv1d.bias is not None
        or {self.activation, self.norm.activation} - {"silu", "swish"}
        or not rows.kernels_take(conv_state, memory, self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight)
    ):
        return None
    projected = rows.products(x, cast(list[Tensor], weights[:4]))
    if projected is None:
        return None
    qkv, z, b, a = projected
    widths = (self.key_dim, self.key_dim, self.value_dim)
    past, y = conv_state[..., 1:].contiguous(), torch.empty_like(z)
    done = native.step_in_place(
        "mixer_step", (memory,), *qkv.split(widths, -1), b, a, z, *self.conv1d.weight.split(widths), past, memory,
        self.A_log, self.dt_bias, self.norm.weight, y, native.rule_code(rules.get("gated_delta")), True,
        self.head_k_dim**-0.5, 1.0, self.norm.variance_epsilon,
    )  # fmt: skip
    if not done:
        return None
    conv_state[..., 0] = conv_state[..., 1]  # transformers keeps one input more than the convolution reads
    conv_state[..., 1:] = past
    return apply_linear(y, self.out_proj)


_PLAIN = frozenset(["dtype", "to", "torch", "float32", "pow", "mean", "rsqrt", "variance_epsilon", "weight"])
# By all names that the code of a layer's forward uses: a forward that does more than these is left alone.
_LAYERS: dict[frozenset[str], Callable[..., Any]] = {
    _PLAIN: rms_norm,
    _PLAIN | {"ACT2FN", "activation"}: rms_norm_gated,
    frozenset(["_norm", "float", "weight", "type_as", "torch", "rsqrt", "pow", "mean", "eps"]): rms_norm_zero_centered,
    frozenset(["gate_proj", "up_proj", "down_proj", "act_fn"]): swiglu_mlp,
}
_GATED_DELTA_NET = frozenset({
    "A_log", "F", "activation", "apply_mask_to_padding_states", "bias", "causal_conv1d_fn", "causal_conv1d_update",
    "conv1d", "conv_kernel_size", "dt_bias", "exp", "float", "get_conv_state", "get_recurrent_state", "head_k_dim",
    "head_v_dim", "in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "is_recording_past", "key_dim", "layer_idx",
    "norm", "out_proj", "pop", "reshape", "shape", "sigmoid", "softplus", "split", "squeeze", "torch",
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "transpose", "update_conv_state",
    "update_recurrent_state", "value_dim", "weight",
    "num_k_heads", "num_v_heads", "repeat_interleave",  # before 5.23: keys of grouped values, which the kernel need not repeat
})  # fmt: skip


def _names_used(owner: type) -> frozenset[str]:
    """The names in a class's own ``forward`` and in the ``_norm`` of a norm."""
    methods = [vars(owner).get(name) for name in ("forward", "_norm")]
    codes = [inspect.unwrap(method).__code__ for method in methods if inspect.isfunction(method)]
    return frozenset(name for code in codes for name in code.co_names)


# Packed sequences.


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
