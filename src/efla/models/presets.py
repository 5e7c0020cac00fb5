"""Configurations by name: ``efla.presets.get("efla-340m")``.

The 340m and 1.3b sizes are those of the paper and of flash-linear-attention's training files. ``tiny`` is the quick CPU size
over bytes; its six models are within 2 % of 470,000 parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from efla.errors import check_names

if TYPE_CHECKING:
    from efla.models.configuration_efla import EflaConfig

# What each model is, apart from its size.
_MODELS: dict[str, dict[str, Any]] = {
    "efla": {"rule": "efla"},
    "gated-efla": {"rule": "gated_efla"},
    "deltanet": {"rule": "delta"},
    "gated-deltanet": {"rule": "gated_delta"},
    "mamba2": {"mixers": ["mamba2"], "intermediate_size": 0},
    "transformer": {"mixers": ["softmax"]},
}

_BYTES = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "norm_eps": 1e-6}


def _paper_size(hidden_size: int, num_heads: int, gated_heads: int) -> dict[str, dict[str, Any]]:
    """The paper's sizes. Gated models keep key heads of width 128; their values are twice as wide: 6 d^2 weights a mixer."""
    wide = {"num_hidden_layers": 21, "num_heads": gated_heads, "head_dim": 128, "value_head_dim": 256}
    return {
        "ungated": {"hidden_size": hidden_size, "num_hidden_layers": 24, "num_heads": num_heads},
        "gated": {"hidden_size": hidden_size, **wide},
        "mamba2": {"hidden_size": hidden_size, "num_hidden_layers": 48, "norm_eps": 1e-5, "residual_in_fp32": True},
        "transformer": {"hidden_size": hidden_size, "num_hidden_layers": 24, "num_attention_heads": 2 * num_heads},
    }


def _byte_size(
    hidden_size: int, num_layers: int, num_heads: int, widths: tuple[int, int], mamba: dict[str, int]
) -> dict[str, dict[str, Any]]:
    """A CPU size over bytes. widths: the inner width of the SwiGLU, without and with gates."""
    shared = {"hidden_size": hidden_size, **_BYTES}
    blocks = {"num_hidden_layers": num_layers, **shared}
    return {
        "ungated": {"num_heads": num_heads, "intermediate_size": widths[0], **blocks},
        "gated": {"num_heads": num_heads, "intermediate_size": widths[1], **blocks},
        "mamba2": {**mamba, **shared},
        "transformer": {"num_attention_heads": num_heads, "intermediate_size": widths[0], **blocks},
    }


_SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": _byte_size(128, 2, 2, (352, 304), {"num_hidden_layers": 3}),
    "340m": _paper_size(1024, 8, 6),
    "1.3b": _paper_size(2048, 16, 12),
}
_FULL = _byte_size(192, 4, 3, (512, 448), {"num_hidden_layers": 7, "mamba_state_size": 64})

# The arms of the CPU protocol: each model, and two controls that change the key norm alone.
_ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta-l2": ("deltanet", {}),
    "exact-flow": ("efla", {}),
    "gated-delta": ("gated-deltanet", {}),
    "gated-exact-flow": ("gated-efla", {}),
    "mamba2": ("mamba2", {}),
    "attention": ("transformer", {}),
    "delta-raw": ("deltanet", {"key_norm": False}),
    "exact-flow-l2": ("efla", {"key_norm": True}),
}
# What people call an arm -> its key in rows.
_ARM_NAMES = {
    **{model: key for key, (model, control) in _ARMS.items() if not control},
    "deltanet-raw": "delta-raw",
    "efla-l2": "exact-flow-l2",
}


_PRESETS = {f"{model}-{size}": (model, size) for model in _MODELS for size in _SIZES}


def names() -> list[str]:
    """Names of all presets."""
    return list(_PRESETS)


def get(name: str, **overrides: Any) -> EflaConfig:
    """The configuration of that name, with any of its fields replaced."""
    check_names("preset", [name], _PRESETS)
    model, size = _PRESETS[name]
    return _build({**_MODELS[model], **_SIZES[size][_shape(model)], **overrides})


def arms() -> list[str]:
    """Names of the CPU protocol's arms."""
    return list(_ARMS)


def arm_of(name: str) -> str:
    """The key of an arm by the name of its model: exact-flow for efla, delta-l2 for deltanet. A key stands for itself."""
    return _ARM_NAMES.get(name, name)


def arm_name(key: str) -> str:
    """What people call an arm: the inverse of :func:`arm_of`."""
    return {key: name for name, key in _ARM_NAMES.items()}[key]


def arm(name: str, size: str = "quick", **overrides: Any) -> EflaConfig:
    """An arm of the CPU protocol in size "quick" or "full", whose vocabulary is bytes, or in a size of the paper."""
    sizes = {"quick": _SIZES["tiny"], "full": _FULL, "340m": _SIZES["340m"], "1.3b": _SIZES["1.3b"]}
    name = arm_of(name)
    check_names("arm", [name], _ARMS)
    check_names("size", [size], sizes)
    model, control = _ARMS[name]
    return _build({**_MODELS[model], **sizes[size][_shape(model)], **control, **overrides})


def _shape(model: str) -> str:
    if model in ("mamba2", "transformer"):
        return model
    return "gated" if model.startswith("gated") else "ungated"


def _build(fields: dict[str, Any]) -> EflaConfig:
    from efla.models.configuration_efla import EflaConfig

    return EflaConfig(**fields)
