"""Conversion of flash-linear-attention's checkpoints (configurations, tensor names, folders) to ours and back.

Model types: ``delta_net`` and ``gated_deltanet`` (also with some softmax layers), ``mamba2`` and ``transformer``.
``mamba2`` includes transformers' own Mamba-2 checkpoints, whose tensors have the same names.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from efla.errors import unknown_name
from efla.models.accounting import on_meta_device
from efla.models.configuration_efla import EflaConfig
from efla.models.saving import add_auto_map, check_loading_info

_INDEX = "model.safetensors.index.json"
MODEL_TYPES = ("delta_net", "gated_deltanet", "mamba2", "transformer")
_RULES = {"delta_net": "delta", "gated_deltanet": "gated_delta"}

# Fields with the same name and meaning on both sides.
_SHARED = (
    "vocab_size hidden_size num_hidden_layers norm_eps initializer_range max_position_embeddings tie_word_embeddings "
    "use_cache pad_token_id bos_token_id eos_token_id"
)
# Options of fla that this library has for some values only: field -> the values accepted, the default first.
_SWISH: dict[str, tuple[Any, ...]] = {"hidden_act": ("swish", "silu")}
_BLOCK = {**_SWISH, "attnres_block_size": (None,)}
_GATE = {"output_gate_activation": ("swish", "silu")}
_ACCEPTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "delta_net": {"use_beta": (True,), "qk_norm": ("l2",), "qk_activation": ("silu",), **_GATE, **_BLOCK},
    "gated_deltanet": {**_GATE, **_BLOCK},
    "mamba2": {
        "use_bias": (False,),
        "use_conv_bias": (True,),
        "D_has_hdim": (False,),
        "rmsnorm": (True,),
        "norm_before_gate": (False,),
        "n_groups": (1,),  # fla normalises each group by itself
        **_SWISH,
    },
    "transformer": {"qkv_bias": (False,), "qk_norm": (False,), "window_size": (None,), **_BLOCK},
}
# Mamba-2's sizes: our field, fla's field, its default.
_MAMBA_SIZES = (
    ("mamba_expand", "expand", 2),
    ("mamba_head_dim", "head_dim", 64),
    ("mamba_state_size", "state_size", 128),
    ("mamba_num_groups", "n_groups", 1),
    ("conv_size", "conv_kernel", 4),
)

# Patterns of ours and theirs; the first pair that matches is used. {} stands for a layer's number.
_BLOCK_NAMES = (
    ("model.embed_tokens.", "model.embeddings."),
    ("model.layers.{}.mixer_norm.", "model.layers.{}.attn_norm."),
    ("model.layers.{}.mixer.q_conv.", "model.layers.{}.attn.q_conv1d."),
    ("model.layers.{}.mixer.k_conv.", "model.layers.{}.attn.k_conv1d."),
    ("model.layers.{}.mixer.v_conv.", "model.layers.{}.attn.v_conv1d."),
    ("model.layers.{}.mixer.", "model.layers.{}.attn."),
)
_MAMBA_NAMES = (
    ("model.embed_tokens.", "backbone.embeddings."),
    ("model.layers.{}.mixer_norm.", "backbone.layers.{}.norm."),
    ("model.layers.{}.mixer.conv.", "backbone.layers.{}.mixer.conv1d."),
    ("model.layers.{}.mixer.", "backbone.layers.{}.mixer."),
    ("model.norm.", "backbone.norm_f."),
)


def config_from_fla(fla: dict[str, Any]) -> EflaConfig:
    """Our configuration for a config.json of flash-linear-attention."""
    kind = fla.get("model_type")
    if kind not in MODEL_TYPES:
        raise unknown_name("flash-linear-attention model type", kind, MODEL_TYPES)
    _check_accepted(kind, fla, _ACCEPTED[kind])
    ours: dict[str, Any] = {key: fla[key] for key in _SHARED.split() if key in fla}
    ours["conv_init"] = "normal"
    hidden, layers = int(fla["hidden_size"]), int(fla["num_hidden_layers"])
    if kind == "mamba2":
        for field in ("dt_limit", "time_step_limit"):  # fla's name and transformers'
            limit = [_number(x) for x in fla.get(field) or (0.0, "inf")]
            if limit != [0.0, float("inf")]:
                raise ValueError(f"mamba2 with {field} = {limit} has no counterpart here; only (0, inf) has")
        ours.update(
            mixers=["mamba2"],
            intermediate_size=0,
            **{field: int(fla.get(theirs, default)) for field, theirs, default in _MAMBA_SIZES},
            norm_eps=fla.get("norm_eps", fla.get("layer_norm_epsilon", 1e-5)),
            residual_in_fp32=fla.get("residual_in_fp32", True),
        )
        return EflaConfig(**ours)
    ours["intermediate_size"] = fla.get("intermediate_size") or _fla_width(hidden, fla.get("hidden_ratio") or 4)
    if kind == "transformer":
        ours.update(mixers=["softmax"], **_softmax_fields(fla))
        return EflaConfig(**ours)
    heads = int(fla["num_heads"])
    value_heads = int(fla.get("num_v_heads") or heads)
    if kind == "delta_net":
        key_dim = round(hidden * fla.get("expand_k", 1.0)) // heads
        value_dim = round(hidden * fla.get("expand_v", 1.0)) // heads
    else:
        key_dim = int(fla.get("head_dim", 256))
        value_dim = round(key_dim * fla.get("expand_v", 2.0))
    ours.update(
        rule=_RULES[kind],
        num_heads=value_heads,
        num_key_heads=heads,
        head_dim=key_dim,
        value_head_dim=value_dim,
        conv_size=fla.get("conv_size", 4) if fla.get("use_short_conv", True) else 0,
        output_gate=fla.get("use_gate", kind == "gated_deltanet"),
        allow_neg_eigval=fla.get("allow_neg_eigval", False),
        key_norm=True,
        query_norm=True,
    )
    if fla.get("attn"):
        softmax_layers = set(fla["attn"]["layers"])
        ours["mixers"] = ["softmax" if i in softmax_layers else "linear" for i in range(layers)]
        ours.update(_softmax_fields(fla["attn"]))
    return EflaConfig(**ours)


def config_to_fla(config: EflaConfig) -> dict[str, Any]:
    """flash-linear-attention's config.json for one of ours; raises for what it has no model for."""
    mixers = cast(list[str], config.mixers)
    kinds = set(mixers) - {"softmax"}
    fla: dict[str, Any] = {key: getattr(config, key) for key in _SHARED.split()}
    is_mamba = kinds == {"mamba2"}
    if len(kinds) > 1 or not kinds <= {"delta", "gated_delta", "mamba2"} or (is_mamba and "softmax" in mixers):
        raise _no_counterpart(" and ".join(sorted(set(mixers))) + " layers")
    if is_mamba == bool(config.intermediate_size):
        raise _no_counterpart("mamba2 with MLPs" if is_mamba else "layers without MLPs")
    if is_mamba:
        if config.mamba_num_groups != 1:
            raise _no_counterpart("mamba_num_groups other than 1")
        fla.update(
            model_type="mamba2",
            architectures=["Mamba2ForCausalLM"],
            residual_in_fp32=config.residual_in_fp32,
            **{theirs: getattr(config, field) for field, theirs, _ in _MAMBA_SIZES},
        )
        return fla
    fla["intermediate_size"] = config.intermediate_size
    softmax = {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "rope_theta": config.rope_theta,
        "qkv_bias": False,
        "window_size": None,
    }
    if "softmax" in mixers and config.attention_head_dim != config.hidden_size // config.num_attention_heads:
        raise _no_counterpart("an attention head width other than hidden_size / num_attention_heads")
    if not kinds:
        fla.update(model_type="transformer", architectures=["TransformerForCausalLM"], **softmax)
        return fla
    rule = kinds.pop()
    if config.key_norm is False or not config.query_norm:
        raise _no_counterpart("keys or queries without L2 norm")
    if config.gate != "mamba" and rule == "gated_delta":
        raise _no_counterpart(f"the gate {config.gate!r}")
    K, V = cast(int, config.head_dim), cast(int, config.value_head_dim)
    fla.update(
        num_heads=config.num_key_heads,
        use_short_conv=config.conv_size > 0,
        conv_size=config.conv_size or 4,
        allow_neg_eigval=config.allow_neg_eigval,
        use_gate=rule == "gated_delta" if config.output_gate is None else config.output_gate,
    )
    if "softmax" in mixers:
        fla["attn"] = {"layers": [i for i, mixer in enumerate(mixers) if mixer == "softmax"], **softmax}
    if rule == "gated_delta":
        fla.update(model_type="gated_deltanet", architectures=["GatedDeltaNetForCausalLM"])
        fla.update(head_dim=K, expand_v=V / K, num_v_heads=config.num_heads)
        return fla
    if config.num_key_heads != config.num_heads:
        raise _no_counterpart("DeltaNet with fewer key than value heads")
    fla.update(model_type="delta_net", architectures=["DeltaNetForCausalLM"])
    fla.update(expand_k=config.num_heads * K / config.hidden_size, expand_v=config.num_heads * V / config.hidden_size)
    return fla


def rename(key: str, kind: str, to_fla: bool) -> str:
    """A tensor's name on the other side; ``kind`` is fla's model type."""
    for pair in _MAMBA_NAMES if kind == "mamba2" else _BLOCK_NAMES:
        here, there = pair if to_fla else pair[::-1]
        match = re.match(re.escape(here).replace(r"\{\}", r"(\d+)"), key)
        if match:
            return there.format(*match.groups()) + key[match.end() :]
    return key


def _softmax_fields(fla: dict[str, Any]) -> dict[str, Any]:
    _check_accepted("softmax attention", fla, _ACCEPTED["transformer"])
    return {
        "num_attention_heads": fla["num_heads"],
        "num_key_value_heads": fla.get("num_kv_heads"),
        "rope_theta": fla.get("rope_theta") or 10_000.0,
    }


def _check_accepted(what: str, fla: dict[str, Any], accepted: dict[str, tuple[Any, ...]]) -> None:
    for field, values in accepted.items():
        if fla.get(field, values[0]) not in values:
            only = " or ".join(map(repr, values))
            raise ValueError(f"{what} with {field} = {fla[field]!r} has no counterpart here; only {only} has")


def _number(value: Any) -> float:
    """A number of a config.json, where transformers writes infinity as {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _fla_width(hidden_size: int, ratio: float) -> int:
    return 256 * -(-int(hidden_size * ratio * 2 / 3) // 256)


def _no_counterpart(what: str) -> ValueError:
    return ValueError(
        f"flash-linear-attention has no model for {what}; it can take delta, gated_delta (also mixed with softmax), "
        "mamba2 and softmax models"
    )


def convert_folder(source: str | Path, target: str | Path) -> dict[str, Any]:
    """Write to ``target`` what ``source`` holds, in the other library's form; returns the new config.json.

    A flash-linear-attention (or transformers Mamba-2) folder becomes ours, one of ours becomes flash-linear-attention's.
    Tokenizer and other small files are copied; weights are renamed shard by shard and never all in memory.
    """
    source, target = Path(source), Path(target)
    if not (source / "config.json").is_file():
        raise FileNotFoundError(
            f"{source} has no config.json; give a checkpoint folder (config.json and *.safetensors)"
        )
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; choose a new folder")
    theirs = json.loads((source / "config.json").read_text())
    to_fla = theirs.get("model_type") == "efla"
    if to_fla:
        config = EflaConfig.from_dict(theirs)
        new = config_to_fla(config)
        kind = str(new["model_type"])
    else:
        config = config_from_fla(theirs)
        kind = theirs["model_type"]
        new = {**config.to_dict(), "architectures": ["EflaForCausalLM"]}
    for key in ("dtype", "torch_dtype"):
        if key in theirs:
            new["dtype"] = theirs[key]

    shards = sorted(source.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"{source} holds no *.safetensors; save the model with save_pretrained first")
    shapes: dict[str, torch.Size] = {}
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                shapes |= {key: torch.Size(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{shard} is damaged ({error}); copy or download it again") from error
    _check(config, shapes if to_fla else {rename(key, kind, to_fla): shape for key, shape in shapes.items()}, source)

    target.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for shard in shards:
        tensors = {rename(key, kind, to_fla): value for key, value in load_file(shard).items()}
        save_file(tensors, target / shard.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard.name)
    index = source / _INDEX
    if index.is_file():
        data = {**json.loads(index.read_text()), "weight_map": weight_map}
        (target / _INDEX).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
    (target / "config.json").write_text(json.dumps(new, indent=2, sort_keys=True, default=str) + "\n")
    if not to_fla:
        add_auto_map(target)
    for path in sorted(source.iterdir()):
        # The card says how to load the model and whose it is, which has just changed.
        is_ours = path.name in ("config.json", "README.md", _INDEX) or path.suffix == ".safetensors"
        if path.is_file() and not is_ours and path.suffix in (".json", ".txt", ".model", ".jinja"):
            shutil.copy2(path, target / path.name)
    return new


def _check(config: EflaConfig, shapes: dict[str, torch.Size], source: Path) -> None:
    """Raise unless the tensors fit the model of the configuration."""
    expected = {name: p.shape for name, p in on_meta_device(config).state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    info = {
        "missing_keys": expected.keys() - shapes.keys(),
        "unexpected_keys": shapes.keys() - expected.keys(),
        "mismatched_keys": [
            (name, shapes[name], expected[name])
            for name in expected.keys() & shapes.keys()
            if shapes[name] != expected[name]
        ],
    }
    check_loading_info("EflaForCausalLM", source, info)
