"""Convert a checkpoint folder (config.json and safetensors), file by file, in either direction."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from efla.interchange import fla
from efla.models.checkpoint import check_loading_info
from efla.models.configuration_efla import EflaConfig

_INDEX = "model.safetensors.index.json"


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
        new = fla.config_to_fla(config)
        kind = str(new["model_type"])
    else:
        config = fla.config_from_fla(theirs)
        kind = theirs["model_type"]
        new = {**config.to_dict(), "architectures": ["EflaForCausalLM"]}
    for key in ("dtype", "torch_dtype"):
        if key in theirs:
            new["dtype"] = theirs[key]

    shards = sorted(source.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"{source} holds no *.safetensors; save the model with save_pretrained first")
    renamed: dict[str, dict[str, str]] = {}
    shapes: dict[str, torch.Size] = {}
    target.mkdir(parents=True, exist_ok=True)
    for shard in shards:
        try:
            tensors = load_file(shard)
        except SafetensorError as error:
            raise ValueError(f"{shard} is damaged ({error}); copy or download it again") from error
        out = {fla.rename(key, kind, to_fla): value for key, value in tensors.items()}
        ours = tensors if to_fla else out
        shapes.update({key: value.shape for key, value in ours.items()})
        save_file(out, target / shard.name, metadata={"format": "pt"})
        renamed[shard.name] = dict.fromkeys(out, shard.name)
    _check(config, shapes, source)

    index = source / _INDEX
    if index.is_file():
        data = json.loads(index.read_text())
        data["weight_map"] = {key: name for files in renamed.values() for key, name in files.items()}
        (target / _INDEX).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
    (target / "config.json").write_text(json.dumps(new, indent=2, sort_keys=True, default=str) + "\n")
    for path in sorted(source.iterdir()):
        # The card says how to load the model and whose it is, which has just changed.
        is_ours = path.name in ("config.json", "README.md", _INDEX) or path.suffix == ".safetensors"
        if path.is_file() and not is_ours and path.suffix in (".json", ".txt", ".model", ".jinja"):
            shutil.copy2(path, target / path.name)
    return new


def _check(config: EflaConfig, shapes: dict[str, torch.Size], source: Path) -> None:
    """Hold the tensors against the model that the configuration describes, without building it."""
    from efla.models.modeling_efla import EflaForCausalLM

    with torch.device("meta"):
        expected = {name: p.shape for name, p in EflaForCausalLM(config).state_dict().items()}
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
