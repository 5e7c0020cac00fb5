"""A block of the decoder: a token mixer and a SwiGLU, each after a norm and with a residual.

Shapes: B batch, T tokens, d hidden size.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from efla.layers import LinearAttention, Mamba2, RMSNorm, SoftmaxAttention, SwiGLU
from efla.layers.linear import is_plain, plain_weights
from efla.layers.softmax_attention import eager_attention
from efla.models import cache as caches
from efla.models.configuration_efla import EflaConfig
from efla.native import rows
from efla.scans.backends import native


def build_mixer(config: EflaConfig, layer_idx: int) -> nn.Module:
    """The token mixer of one layer, a layer of :mod:`efla.layers` with the configuration's sizes."""
    mixer = cast(list[str], config.mixers)[layer_idx]
    if mixer == "softmax":
        return SoftmaxAttention(
            config.hidden_size,
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.attention_head_dim,
            rope_theta=config.rope_theta,
        )
    shared: dict[str, Any] = {
        "conv_size": config.conv_size,
        "eps": config.norm_eps,
        "backend": config.backend,
        "chunk_size": config.chunk_size,
    }
    if mixer == "mamba2":
        return Mamba2(
            config.hidden_size,
            expand=config.mamba_expand,
            head_dim=config.mamba_head_dim,
            state_size=config.mamba_state_size,
            num_groups=config.mamba_num_groups,
            num_blocks=config.num_hidden_layers,
            **shared,
        )
    return LinearAttention(
        config.hidden_size,
        rule=mixer,
        num_heads=config.num_heads,
        num_key_heads=config.num_key_heads,
        head_dim=cast(int, config.head_dim),
        value_head_dim=config.value_head_dim,
        key_norm=config.key_norm,
        query_norm=config.query_norm,
        output_gate=config.output_gate,
        gate=config.gate,
        allow_neg_eigval=config.allow_neg_eigval,
        **shared,
    )


class EflaBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """x = x + mixer(RMSNorm(x)); x = x + mlp(RMSNorm(x)), the second only with an MLP. x: [B, T, d]."""

    def __init__(self, config: EflaConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = build_mixer(config, layer_idx)
        if config.intermediate_size:
            self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        hidden: Tensor,
        *,
        mask: Tensor | None = None,
        causal_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if hidden.shape[1] == 1 and mask is None and cu_seqlens is None and past_key_values is not None:
            stepped = self._step(hidden, past_key_values)
            if stepped is not None:
                return stepped
        x = self.mixer_norm(hidden).to(self.mixer_norm.weight.dtype)
        if isinstance(self.mixer, SoftmaxAttention):
            update = None if past_key_values is None else partial(past_key_values.update, layer_idx=self.layer_idx)
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
            y, _ = self.mixer(
                x, position_ids=position_ids, mask=causal_mask, update_cache=update, attend=attend, **kwargs
            )
        else:
            log = caches.recording_layer(past_key_values, self.layer_idx, self.mixer)
            if log is not None and x.shape[1] > caches.REWINDABLE:
                split = x.shape[1] - caches.REWINDABLE  # the last tokens apart, so that they can be taken back
                masks = (None, None) if mask is None else (mask[:, :split], mask[:, split:])
                log.segments.clear()
                first = self._mix(x[:, :split], masks[0], None, past_key_values, None)
                y = torch.cat([first, self._mix(x[:, split:], masks[1], None, past_key_values, log)], dim=1)
            else:
                y = self._mix(x, mask, cu_seqlens, past_key_values, log)
        hidden = hidden + y
        if self.config.intermediate_size:
            hidden = hidden + self.mlp(self.mlp_norm(hidden).to(self.mlp_norm.weight.dtype))
        return hidden

    def _step(self, hidden: Tensor, cache: Cache) -> Tensor | None:
        """The output for one token, [B, 1, d], with one kernel call for the whole block; the state is updated in place.

        ``None`` where the kernel does not apply: with another mixer, gradients or a log of the last tokens, or if a module has
        hooks, an adapter or another class. It reads the parameters at each call, so it sees them as they are.
        """
        mixer, mlp = cast(Any, self.mixer), getattr(self, "mlp", None)
        norms = self.mixer_norm, None if mlp is None else self.mlp_norm
        if (
            not is_plain(mixer, LinearAttention)
            or (mlp is not None and not is_plain(mlp, SwiGLU))
            or any(norm is not None and not is_plain(norm, RMSNorm) for norm in norms)
            or hidden.shape[0] > rows.MAX_PRODUCT_ROWS
            or caches.recording_layer(cache, self.layer_idx, mixer) is not None
        ):
            return None
        step = mixer.decoding_step(hidden, caches.read_state(cache, self.layer_idx, hidden.shape[0]))
        maps = (*mixer.projections(), mixer.o_proj)
        weights = plain_weights(
            maps if mlp is None else (*maps, mlp.gate_proj, mlp.up_proj, mlp.down_proj), hidden.dtype
        )
        if step is None or weights is None:
            return None
        gains = [None if norm is None else rows.gain(norm.weight, hidden) for norm in norms]
        mlp_weights = weights[7:] or [None] * 3
        y = torch.empty_like(hidden)
        done = native.step_in_place(
            "block_step", step.states, hidden, gains[0], *weights[:7], gains[1], *mlp_weights, *step.tensors, y,
            *step.settings, *(0.0 if norm is None else norm.eps for norm in norms),
        )  # fmt: skip
        return y if done else None

    def _mix(
        self,
        x: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: Cache | None,
        log: caches.RewindableLayer | None,
    ) -> Tensor:
        """Run a recurrent mixer on x [B, T, d], from the state in the cache and back into it."""
        state = caches.read_state(cache, self.layer_idx, x.shape[0])
        options: dict[str, Any] = {} if log is None else {"record": partial(log.record, mask, state)}
        if state is not None:
            options["inplace_state"] = True
        y, state = self.mixer(
            x, mask=mask, cu_seqlens=cu_seqlens, state=state, output_state=cache is not None, **options
        )
        if cache is not None and state is not None:
            caches.write_state(cache.layers[self.layer_idx], state)
        return cast(Tensor, y)
