"""Layers, each usable alone in any ``nn.Module``."""

from efla.layers.attention import LinearAttention, MixerState
from efla.layers.blocks import RMSNorm, SwiGLU
from efla.layers.mamba2 import Mamba2
from efla.layers.short_conv import ShortConvolution
from efla.layers.softmax_attention import SoftmaxAttention

__all__ = ["LinearAttention", "Mamba2", "MixerState", "RMSNorm", "ShortConvolution", "SoftmaxAttention", "SwiGLU"]
