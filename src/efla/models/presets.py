"""Configurations by name: ``efla.presets.get("efla-340m")``.

The 340m and 1.3b sizes are those of the paper and of flash-linear-attention's training files (spec lm.md 2.2); ``tiny``
is the quick CPU size over bytes (spec 7.2), all six within 2 % of 470,000 parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from efla.errors import unknown_name

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
_MAMBA = {"norm_eps": 1e-5, "residual_in_fp32": True}
# Key head widths stay at 128 in the gated models, as the paper says; values are twice as wide, 6 d^2 weights a mixer.
_SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "ungated": {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 352, **_BYTES},
        "gated": {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 304, **_BYTES},
        "mamba2": {"hidden_size": 128, "num_hidden_layers": 3, **_BYTES},
        "transformer": {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 352,
            **_BYTES,
        },
    },
    "340m": {
        "ungated": {"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 8},
        "gated": {
            "hidden_size": 1024,
            "num_hidden_layers": 21,
            "num_heads": 6,
            "head_dim": 128,
            "value_head_dim": 256,
        },
        "mamba2": {"hidden_size": 1024, "num_hidden_layers": 48, **_MAMBA},
        "transformer": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
    },
    "1.3b": {
        "ungated": {"hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 16},
        "gated": {
            "hidden_size": 2048,
            "num_hidden_layers": 21,
            "num_heads": 12,
            "head_dim": 128,
            "value_head_dim": 256,
        },
        "mamba2": {"hidden_size": 2048, "num_hidden_layers": 48, **_MAMBA},
        "transformer": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32},
    },
}

# The CPU protocol's arms (spec lm.md 7.2): the model, and the two controls that change the key norm alone.
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
_FULL: dict[str, dict[str, Any]] = {
    "ungated": {"hidden_size": 192, "num_hidden_layers": 4, "num_heads": 3, "intermediate_size": 512},
    "gated": {"hidden_size": 192, "num_hidden_layers": 4, "num_heads": 3, "intermediate_size": 448},
    "mamba2": {"hidden_size": 192, "num_hidden_layers": 7, "mamba_state_size": 64},
    "transformer": {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 512},
}


def names() -> list[str]:
    """Names of all presets."""
    return [f"{model}-{size}" for model in _MODELS for size in _SIZES]


def get(name: str, **overrides: Any) -> EflaConfig:
    """The configuration of that name, with any of its fields replaced."""
    known = {f"{model}-{size}": (model, size) for model in _MODELS for size in _SIZES}
    if name not in known:
        raise unknown_name("preset", name, known)
    model, size = known[name]
    return _build({**_MODELS[model], **_SIZES[size][_shape(model)], **overrides})


def arms() -> list[str]:
    """Names of the CPU protocol's arms."""
    return list(_ARMS)


def arm(name: str, profile: str = "quick", **overrides: Any) -> EflaConfig:
    """An arm of the CPU protocol in one of its two sizes, "quick" or "full"; vocabularies are bytes."""
    if name not in _ARMS:
        raise unknown_name("arm", name, _ARMS)
    if profile not in ("quick", "full"):
        raise unknown_name("profile", profile, ["quick", "full"])
    model, control = _ARMS[name]
    size = _SIZES["tiny"][_shape(model)] if profile == "quick" else {**_FULL[_shape(model)], **_BYTES}
    return _build({**_MODELS[model], **size, **control, **overrides})


def _shape(model: str) -> str:
    if model in ("mamba2", "transformer"):
        return model
    return "gated" if model.startswith("gated") else "ungated"


def _build(fields: dict[str, Any]) -> EflaConfig:
    from efla.models.configuration_efla import EflaConfig

    return EflaConfig(**fields)
