"""Softmax attention with rotary positions: the quadratic baseline, and a layer of hybrid models.

Shapes: B batch, T new tokens, S all tokens so far, H heads, D width per head.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from efla.layers.linear import apply_linear, apply_linears
from efla.native.rows import position_in_sequence


class SoftmaxAttention(nn.Module):
    """Causal multi-head attention over all tokens so far.

        o_t = sum_{i <= t} softmax_i( R_t q_t . R_i k_i / sqrt(D) ) v_i,      y = Wo o

    x, y: [B, T, hidden_size]; R_t rotates the pairs (j, j + D/2) by t * rope_theta^(-2j/D). No q/k norm.
    num_key_value_heads: fewer key-value than query heads, default as many. head_dim: default hidden_size / num_heads.
    bias: of the four linear maps, default none.
    """

    is_causal = True  # read by transformers' attention functions

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float = 10_000.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(
                f"hidden_size {hidden_size} does not divide into {num_heads} attention heads; "
                "choose another number of heads or give head_dim"
            )
        self.num_heads = num_heads
        self.num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        if num_heads % self.num_key_value_heads:
            raise ValueError(
                f"{num_heads} attention heads cannot share num_key_value_heads={self.num_key_value_heads} evenly"
            )
        self.num_key_value_groups = num_heads // self.num_key_value_heads
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        if self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head width, got {self.head_dim}")
        self.rope_theta = rope_theta
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, self.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, self.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)

    def forward(
        self,
        x: Tensor,
        *,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        update_cache: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        attend: Callable[..., tuple[Tensor, Tensor | None]] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, and return (y, attention weights or ``None``).

        mask: [B, T] false at padding, or a mask [B, 1, T, S] ready for ``attend``; without one attention is causal.
        update_cache: takes the new keys and values [B, H, T, D] and returns all so far.
        attend: one of transformers' attention functions; default torch's scaled_dot_product_attention.
        """
        B, T = x.shape[:2]
        if mask is None and cu_seqlens is not None:
            position_ids, mask = _packed_positions_and_mask(cu_seqlens, B, T)
        elif mask is not None and mask.dim() == 2:
            if position_ids is None:
                position_ids = (mask.long().cumsum(-1) - 1).clamp(min=0)
            mask = _causal(T, x.device) & mask[:, None, None, :].bool()
        if position_ids is None:
            position_ids = torch.arange(T, device=x.device)[None]
        projected = apply_linears(x, (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (cast(Tensor, p).view(B, T, -1, self.head_dim).transpose(1, 2) for p in projected)
        cos, sin = rotary_angles(position_ids, self.head_dim, self.rope_theta)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if update_cache is not None:
            k, v = update_cache(k, v)
        if attend is None:
            o = functional.scaled_dot_product_attention(
                q,
                k,
                v,
                mask,
                is_causal=mask is None and T > 1,
                scale=self.scaling,
                enable_gqa=self.num_key_value_groups > 1,
            ).transpose(1, 2)
            weights = None
        else:
            o, weights = attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return apply_linear(o.reshape(B, T, -1), self.o_proj), weights


def rotary_angles(position_ids: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position * theta^(-2j/D), each [B, 1, T, D/2] in float32."""
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32) / head_dim
    angles = position_ids[:, None, :, None].float() * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (j, j + D/2) of x [B, H, T, D] by the angles given, in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(wide).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention written out, for when its weights are wanted: returns o [B, T, H, D] and the weights [B, H, T, S]."""
    groups = module.num_key_value_groups
    key, value = (x.repeat_interleave(groups, dim=1) if groups != 1 else x for x in (key, value))  # type: ignore[arg-type]
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _causal(T: int, device: torch.device) -> Tensor:
    return torch.ones(T, T, dtype=torch.bool, device=device).tril()


def _packed_positions_and_mask(cu_seqlens: Tensor, B: int, T: int) -> tuple[Tensor, Tensor]:
    """Positions [B, T] that restart with each packed sequence, and the mask [B, 1, T, T] that separates them."""
    positions = position_in_sequence(cu_seqlens, B * T).view(B, T)
    start = torch.arange(B * T, device=positions.device).view(B, T) - positions
    same = start[:, :, None] == start[:, None, :]
    return positions, (same & _causal(T, positions.device))[:, None]
