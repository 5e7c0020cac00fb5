"""What a configuration costs: parameters, state bytes per sequence, floating-point operations per token."""

from typing import cast

import torch
from torch import nn

from efla.layers.linear import PackedLinear
from efla.models.configuration_efla import EflaConfig


def parameter_count(model: nn.Module) -> int:
    """Number of distinct parameters of a model, packed weights included."""
    packed = [m for m in model.modules() if isinstance(m, PackedLinear)]
    return sum(p.numel() for p in model.parameters()) + sum(
        m.out_features * (m.in_features * (not m.is_tied) + (m.bias is not None)) for m in packed
    )


def count_parameters(config: EflaConfig) -> int:
    """Number of distinct parameters; builds the model on the meta device, without memory."""
    from efla.models.modeling_efla import EflaForCausalLM

    with torch.device("meta"):
        model = EflaForCausalLM(config)
    return parameter_count(model)


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
    d = config.hidden_size
    total = 2 * d * config.vocab_size
    for mixer in cast(list[str], config.mixers):
        total += 6 * d * (config.intermediate_size or 0)
        if mixer == "softmax":
            width = config.num_attention_heads * (config.attention_head_dim or 0)
            key_width = (config.num_key_value_heads or 0) * (config.attention_head_dim or 0)
            total += 4 * d * (width + key_width) + 4 * width * (context + 1)
            continue
        memory, channels = _memory_and_channels(config, mixer)
        total += 6 * memory + 2 * channels * config.conv_size
        if mixer == "mamba2":
            inner = config.mamba_expand * d
            total += 2 * d * (inner + channels + inner // config.mamba_head_dim) + 2 * inner * d
        else:
            total += 2 * d * _linear_width(config, mixer)
    return total


def _memory_and_channels(config: EflaConfig, mixer: str) -> tuple[int, int]:
    """Numbers in a layer's memory, and channels of its convolutions."""
    if mixer == "mamba2":
        inner = config.mamba_expand * config.hidden_size
        groups = config.mamba_num_groups * config.mamba_state_size
        return inner * config.mamba_state_size, inner + 2 * groups
    K, V = cast(int, config.head_dim), cast(int, config.value_head_dim)
    return config.num_heads * K * V, 2 * cast(int, config.num_key_heads) * K + config.num_heads * V


def _linear_width(config: EflaConfig, rule: str) -> int:
    """Summed output widths of a linear layer's maps from the hidden size (Wo counted as one)."""
    from efla import rules

    update = rules.get(rule)
    value = config.num_heads * cast(int, config.value_head_dim)
    has_gate = update.needs_gate if config.output_gate is None else config.output_gate
    width = 2 * cast(int, config.num_key_heads) * cast(int, config.head_dim) + 2 * value
    return width + config.num_heads * (update.needs_beta + update.needs_gate) + value * has_gate
