"""What a configuration costs: parameters, state bytes per sequence, floating-point operations per token."""

from typing import cast

import torch
from torch import nn

from efla.layers import ShortConvolution
from efla.layers.linear import PackedLinear
from efla.models.configuration_efla import EflaConfig


def parameter_count(model: nn.Module) -> int:
    """Number of distinct parameters of a model, packed weights included."""
    packed = [m for m in model.modules() if isinstance(m, PackedLinear)]
    return sum(p.numel() for p in model.parameters()) + sum(
        m.out_features * (m.in_features * (not m.is_tied) + (m.bias is not None)) for m in packed
    )


def count_parameters(config: EflaConfig) -> int:
    """Number of distinct parameters."""
    return parameter_count(on_meta_device(config))


def state_bytes(config: EflaConfig, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of recurrent state per sequence of any length: float32 memory and the convolutions' last inputs.

    Per linear layer 4 H K V + b (2 Hk K + H V) (W - 1), per Mamba-2 layer 4 H N P + b (H P + 2 G N) (W - 1), where b is
    the size of ``dtype``; a layer without convolutions leaves 4 bytes.
    """
    total = 0
    for mixer in cast(list[str], config.mixers):
        if mixer != "softmax":
            memory, channels = _memory_and_channels(config, mixer)
            total += memory * max(4, dtype.itemsize)
            total += channels * (config.conv_size - 1) * dtype.itemsize if config.conv_size else max(4, dtype.itemsize)
    return total


def cache_bytes_per_token(config: EflaConfig, dtype: torch.dtype = torch.float32) -> int:
    """Bytes by which the softmax layers' cache grows with each token; 0 without such layers."""
    num_softmax = cast(list[str], config.mixers).count("softmax")
    width = (config.num_key_value_heads or 0) * (config.attention_head_dim or 0)
    return num_softmax * 2 * width * dtype.itemsize


def flops_per_token(config: EflaConfig, context: int = 0) -> int:
    """Forward floating-point operations for one token after ``context`` others.

    2 per weight of every linear map (the head included, the embedding not), 2 per weight of a convolution, 6 K V per
    head for the scan, 4 D per head and earlier token for softmax attention.
    """
    maps = [m for m in on_meta_device(config).modules() if isinstance(m, (nn.Linear, ShortConvolution))]
    total = 2 * sum(m.weight.numel() for m in maps)
    for mixer in cast(list[str], config.mixers):
        if mixer == "softmax":
            total += 4 * config.num_attention_heads * cast(int, config.attention_head_dim) * (context + 1)
        else:
            total += 6 * _memory_and_channels(config, mixer)[0]
    return total


def on_meta_device(config: EflaConfig) -> nn.Module:
    """The language model of a configuration, without memory for its parameters."""
    from efla.models.modeling_efla import EflaForCausalLM

    with torch.device("meta"):
        return EflaForCausalLM(config)


def _memory_and_channels(config: EflaConfig, mixer: str) -> tuple[int, int]:
    """Numbers in a layer's memory, and channels of its convolutions."""
    if mixer == "mamba2":
        inner = config.mamba_expand * config.hidden_size
        groups = config.mamba_num_groups * config.mamba_state_size
        return inner * config.mamba_state_size, inner + 2 * groups
    K, V = cast(int, config.head_dim), cast(int, config.value_head_dim)
    return config.num_heads * K * V, 2 * cast(int, config.num_key_heads) * K + config.num_heads * V
