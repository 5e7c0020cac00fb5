"""``efla info``: what a model is and what it costs."""

from __future__ import annotations

import json as json_format
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, cast

import tyro

if TYPE_CHECKING:
    from efla.models.configuration_efla import EflaConfig


def info(
    model: Annotated[str, tyro.conf.Positional],
    context: int = 2048,
    json: bool = False,
) -> int:
    """Print a model's mixers, sizes, parameters, state per sequence and operations per token.

    Args:
        model: A folder with config.json, a name on the Hugging Face hub, or a preset (efla.presets.names()).
        context: Earlier tokens for the operations and memory of softmax layers.
        json: Print JSON instead of a table.
    """
    facts = describe(load_config(model), context)
    if json:
        print(json_format.dumps({"model": model, **facts}, indent=2))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        print(f"{name.replace('_', ' '):<{width}}  {shown}")
    return 0


def load_config(model: str) -> EflaConfig:
    """The configuration of a preset, a folder or a hub name."""
    from pathlib import Path

    from efla.models import presets
    from efla.models.configuration_efla import EflaConfig

    if model in presets.names():
        return presets.get(model)
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise FileNotFoundError(f"{model} has no config.json; give a folder written by save_pretrained or efla train")
    if not path.is_dir() and (path.is_absolute() or model.startswith(".") or model.count("/") != 1):
        raise FileNotFoundError(
            f"{model!r} is neither a folder, a hub name (owner/name) nor a preset; presets: {', '.join(presets.names())}"
        )
    values, _ = EflaConfig.get_config_dict(model)
    kind = values.get("model_type")
    if kind != "efla":
        raise ValueError(f"{model} is a {kind!r} model; `efla convert` reads flash-linear-attention's into ours")
    return EflaConfig.from_dict(values)


def describe(config: EflaConfig, context: int) -> dict[str, Any]:
    """Facts about a configuration, in the order in which they are printed."""
    from efla.models import accounting

    mixers = cast("list[str]", config.mixers)
    facts: dict[str, Any] = {
        "mixers": ", ".join(f"{name} x {count}" for name, count in Counter(mixers).items()),
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
    }
    if any(mixer not in ("softmax", "mamba2") for mixer in mixers):
        facts["heads"] = f"{config.num_heads} (keys {config.head_dim}, values {config.value_head_dim} wide)"
    if "softmax" in mixers:
        facts["attention_heads"] = f"{config.num_attention_heads} ({config.attention_head_dim} wide)"
    parameters = accounting.count_parameters(config)
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    facts |= {
        "mlp_width": config.intermediate_size or 0,
        "vocabulary": config.vocab_size,
        "parameters": parameters,
        "parameters_without_embeddings": parameters - embeddings,
        "state_bytes_per_sequence": accounting.state_bytes(config),
        "cache_bytes_per_token": accounting.cache_bytes_per_token(config),
        f"flops_per_token_after_{context}": accounting.flops_per_token(config, context),
    }
    return facts
