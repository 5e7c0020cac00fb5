"""Smaller weights on a CPU: float16 or int8 in the linear maps.

    EflaForCausalLM.from_pretrained(folder, quantization_config=CpuWeightsConfig("int8"))

Works for every model of transformers. Weights are rounded when they are loaded, and cannot be trained or saved.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from efla.errors import check_names
from efla.layers.linear import PackedLinear

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


def pack_linears(model: nn.Module, weights: str) -> nn.Module:
    """Replace the model's linear maps, except narrow ones, by packed ones; no parameter requires gradients then."""
    packed: list[tuple[PackedLinear, Tensor]] = []
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child.out_features >= _FEWEST_OUTPUTS:
                packed.append((PackedLinear(child, weights), child.weight))
                setattr(parent, name, packed[-1][0])
    if not packed:
        raise ValueError(f"{type(model).__name__} has no torch.nn.Linear to store as {weights}")
    kept = set(map(id, model.parameters()))
    for linear, weight in packed:
        linear.is_tied = id(weight) in kept
    return model.requires_grad_(False)


def stored_dtype(model: nn.Module) -> str:
    """How the weights of the linear maps are stored: float16 or int8 if they are packed, otherwise the model's dtype."""
    packed = (module.weights for module in model.modules() if isinstance(module, PackedLinear))
    return next(packed, str(model.dtype))
