"""Smaller weights on a CPU: float16 or int8 in the linear maps, by the fbgemm kernels that torch contains.

    EflaForCausalLM.from_pretrained(folder, quantization_config=CpuWeightsConfig("int8"))

Works for every model of transformers. Weights are rounded when they are loaded, and cannot be trained or saved.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from efla.errors import check_names

METHOD = "efla_cpu"
WEIGHTS = ("float16", "int8")
_FEWEST_OUTPUTS = 32
"""Narrower maps stay float32: the gates of a layer, whose few weights steer its whole memory."""

_logger = logging.get_logger(__name__)


@register_quantization_config(METHOD)  # type: ignore[untyped-decorator]
class CpuWeightsConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How a model's linear maps are stored. weights: "float16", or "int8" with one scale for each output."""

    def __init__(self, weights: str = "int8", **kwargs: Any) -> None:
        check_names("format of weights", [weights], WEIGHTS)
        self.quant_method = cast(Any, METHOD)
        self.weights = weights


@register_quantizer(METHOD)  # type: ignore[untyped-decorator]
class CpuWeightsQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads a model in float32, then replaces its linear maps."""

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise RuntimeError("float16 and int8 weights need torch's fbgemm kernels: an x86 CPU with AVX2")
        devices = {torch.device(place).type for place in (device_map or {}).values()}
        if devices - {"cpu"}:
            raise ValueError(f"float16 and int8 weights run on the CPU only, got device_map {device_map}; leave it out")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        return pack_linears(model, cast(CpuWeightsConfig, self.quantization_config).weights)

    def is_serializable(self) -> bool:
        _logger.warning("The weights are packed for this CPU. Save the model that they were loaded from instead.")
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class PackedLinear(nn.Module):
    """y = x W^T + b with W in fbgemm's layout, 2 or 1 bytes a weight; x, y: [..., size].

    With int8, x is rounded to 7 bits between its own smallest and largest number: products of 8 bits would overflow the
    16-bit sums of AVX2.
    """

    def __init__(self, linear: nn.Linear, weights: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.weights = linear.in_features, linear.out_features, weights
        weight = linear.weight.detach().float()
        bias = None if linear.bias is None else linear.bias.detach().float()
        if not weight.isfinite().all():
            raise ValueError(f"cannot store weights that are not finite as {weights}")
        if weights == "float16":
            self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
            return
        scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*deprecated")
            zeros = torch.zeros_like(scales, dtype=torch.long)
            quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(quantized, bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            raise RuntimeError(f"{self.weights} weights have no backward pass; load the model without them to train")
        wide = x.float()
        if self.weights == "float16":
            y = torch.ops.quantized.linear_dynamic_fp16(wide, self._packed)
        else:
            y = torch.ops.quantized.linear_dynamic(wide, self._packed, reduce_range=True)
        return cast(Tensor, y.to(x.dtype))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, weights={self.weights}"


def pack_linears(model: nn.Module, weights: str) -> nn.Module:
    """Replace the model's linear maps, except narrow ones, by :class:`PackedLinear`; no parameter requires gradients then."""
    found = False
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child.out_features >= _FEWEST_OUTPUTS:
                setattr(parent, name, PackedLinear(child, weights))
                found = True
    if not found:
        raise ValueError(f"{type(model).__name__} has no torch.nn.Linear to store as {weights}")
    return model.requires_grad_(False)
