"""The functions and layers of transformers' gated-delta-rule models on efla's kernels; :mod:`efla.integrations.transformers`
puts them in their place.

Functions and forwards have the signatures of transformers' own. Those that return ``None`` for what the kernels do not take are
called by :func:`or_original`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN, SiLUActivation

from efla import rules
from efla.layers.attention import DecodingStep
from efla.layers.blocks import SwiGLU
from efla.layers.linear import apply_linear, is_plain, plain_weights
from efla.models.compat import cached_states
from efla.native import rows
from efla.scans.api import linear_attention
from efla.scans.backends import native


def runs_here(x: Tensor) -> bool:
    """Whether the kernels take this tensor; the original function takes all others."""
    return x.device.type == "cpu" and not torch.compiler.is_exporting()


def or_original(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The function, and with the same arguments the original where that returns ``None``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return original(*args, **kwargs) if result is None else result

    call.__efla_kernel__ = function  # type: ignore[attr-defined]
    return call


def chunk_gated_delta_rule(
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
) -> tuple[Tensor, Tensor | None] | None:
    if not runs_here(query):
        return None
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None] | None:
    options = 64, initial_state, output_final_state, use_qk_l2norm_in_kernel
    return chunk_gated_delta_rule(query, key, value, g, beta, *options, **kwargs)


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """[B, C, T], which is a view of [B, T, C]; no window crosses a boundary in ``cu_seq_lens_q``."""
    if not runs_here(hidden_states):
        return None
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    x = hidden_states.to(weight.dtype).transpose(1, 2)
    is_silu = activation in ("silu", "swish")
    arguments = x if cu_seqlens is None else x.flatten(0, 1)[None], weight, bias, None, cu_seqlens, is_silu
    y = rows.causal_conv(*arguments)
    if y is None and cu_seqlens is not None:
        y = rows.torch_conv(*arguments)
    if y is None:
        return None
    if activation is not None and not is_silu:
        y = ACT2FN[activation](y)
    return y.view(x.shape).transpose(1, 2).to(hidden_states.dtype)


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | None:
    """One token: [B, C, 1]. conv_state [B, C, W] takes it in place of the oldest."""
    if not runs_here(hidden_states) or hidden_states.shape[2] != 1 or conv_state.shape[2] != weight.shape[1]:
        return None
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

# Forwards of layers, with transformers' parameters on ``self``, for tensors on a CPU.


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return rows.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def rms_norm_zero_centered(self: Any, x: Tensor) -> Tensor:
    return rows.rms_norm(x, _zero_centered(self.weight, x), self.eps)


def rms_norm_gated(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    if self.activation in ("silu", "swish"):
        return rows.rms_norm(hidden_states, self.weight, self.variance_epsilon, gate)
    y = rows.rms_norm(hidden_states, self.weight, self.variance_epsilon)
    return (y * ACT2FN[self.activation](gate.to(rows.wider(gate)))).to(y.dtype)


def swiglu_mlp(self: Any, x: Tensor) -> Tensor:
    if isinstance(self.act_fn, (nn.SiLU, SiLUActivation)):
        return SwiGLU.forward(self, x)
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def linear(self: Any, input: Tensor) -> Tensor:
    if self.bias is None:
        return rows.linear(input, self.weight)
    return functional.linear(input, self.weight, self.bias)


def runs(module: nn.Module, kernel: Callable[..., Any]) -> bool:
    """Whether calling the module runs this function of ours, put in place of its class's forward, and nothing else."""
    return getattr(type(module).forward, "__efla_kernel__", None) is kernel and is_plain(module, type(module))


_INPUTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def decode(
    self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """A token after a cached state through a mixer with Qwen3.5's parameters, by one kernel between the products."""
    x, is_packed = hidden_states, kwargs.get("cu_seq_lens_q") is not None
    if x.shape[1] != 1 or cache_params is None or attention_mask is not None or is_packed:
        return None
    step = _decoding_step(self, x, cache_params)
    weights = None if step is None else plain_weights([self._modules[name] for name in _INPUTS], x.dtype)
    projected = None if weights is None else rows.products(x, cast(list[Tensor], weights))
    if step is None or projected is None:
        return None
    qkv, z, b, a = projected
    y = torch.empty_like(z)
    inputs = (*qkv.split(_widths(self), -1), b, a, z)
    done = native.step_in_place("mixer_step", step.states, *inputs, *step.tensors, y, *step.settings)
    return apply_linear(y, self.out_proj) if done else None


def decode_layer(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """A token after a cached state through a layer of Qwen3.5 with both residuals, by one kernel.

    It reads the modules and their parameters at each call, so it sees them as they are.
    """
    x, cache = hidden_states, kwargs.get("past_key_values")
    is_masked = any(kwargs.get(name) is not None for name in ("attention_mask", "cu_seq_lens_q"))
    if x.shape[1] != 1 or cache is None or is_masked or "linear_attn" not in self._modules:
        return None
    mixer, mlp = self.linear_attn, self.mlp
    norms = self.input_layernorm, self.post_attention_layernorm
    if (
        not (runs(mixer, decode) and runs(mlp, swiglu_mlp) and _is_silu(mlp.act_fn))
        or not all(runs(norm, rms_norm_zero_centered) for norm in norms)
        or x.shape[0] > rows.MAX_PRODUCT_ROWS
    ):
        return None
    step = _decoding_step(mixer, x, cache)
    maps = [mixer._modules[name] for name in (*_INPUTS, "out_proj")]
    weights = plain_weights([*maps, mlp.gate_proj, mlp.up_proj, mlp.down_proj], x.dtype)
    if step is None or weights is None:
        return None
    qkv, z, b, a, out, *mlp_weights = cast(list[Tensor], weights)
    gains = [_zero_centered(norm.weight, x) for norm in norms]
    y = torch.empty_like(x)
    done = native.step_in_place(
        "block_step", step.states, x, gains[0], *qkv.split(_widths(mixer)), b, a, z, out, gains[1], *mlp_weights,
        *step.tensors, y, *step.settings, *(norm.eps for norm in norms),
    )  # fmt: skip
    return y if done else None


def _decoding_step(mixer: Any, x: Tensor, cache: Any) -> DecodingStep | None:
    """What the decoding kernels take beside x [B, 1, d] and the products' weights; ``None`` where they do not apply."""
    conv_state, memory = cached_states(cache, mixer.layer_idx)
    conv, norm = mixer.conv1d, mixer.norm
    if (
        memory is None
        or conv_state is None
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or getattr(cache.layers[mixer.layer_idx], "record_past", False)
        or not (is_plain(conv, nn.Conv1d) and runs(norm, rms_norm_gated))
        or conv.bias is not None
        or {mixer.activation, norm.activation} - {"silu", "swish"}
    ):
        return None
    tensors = (conv_state, memory, mixer.A_log, mixer.dt_bias, norm.weight)
    if not rows.kernels_take(x, conv.weight, *tensors):
        return None
    settings = (native.rule_code(rules.get("gated_delta")), True, mixer.head_k_dim**-0.5, 1.0, norm.variance_epsilon)
    return DecodingStep((*conv.weight.split(_widths(mixer)), *tensors), settings)


def _widths(mixer: Any) -> tuple[int, int, int]:
    """Of q, k and v."""
    return mixer.key_dim, mixer.key_dim, mixer.value_dim


def _is_silu(module: nn.Module) -> bool:
    return is_plain(module, nn.SiLU) or is_plain(module, SiLUActivation)


def _zero_centered(weight: Tensor, x: Tensor) -> Tensor:
    return 1.0 + weight.to(rows.wider(x))
