"""Loading with errors that name what does not fit; saving as safetensors, with a model card and for stock tools."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from efla.models.accounting import cache_bytes_per_token, parameter_count, state_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Self

    from efla.models.configuration_efla import EflaConfig

AUTO_CLASSES = {
    "AutoConfig": "EflaConfig",
    "AutoModel": "EflaModel",
    "AutoModelForCausalLM": "EflaForCausalLM",
    "AutoModelForSequenceClassification": "EflaForSequenceClassification",
}
_MODULE = "modeling_efla"
# A head may be missing or unexpected when a checkpoint is loaded for another task.
_HEADS = ("lm_head.", "score.")


class CheckpointMixin:
    """``from_pretrained`` that rejects a checkpoint that does not fit, and ``save_pretrained`` with a model card."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *args: Any,
        strict: bool = True,
        **kwargs: Any,
    ) -> Self:
        """As in transformers, from safetensors only; ``strict=False`` initialises missing tensors."""
        wants_info = kwargs.pop("output_loading_info", False)
        lets_shapes_differ = kwargs.get("ignore_mismatched_sizes", False)
        if strict:
            kwargs["ignore_mismatched_sizes"] = True  # we name them below
        if kwargs.pop("use_safetensors", True) is False:
            raise ValueError("weights are loaded from safetensors only; pickled ones can run code on loading")
        try:
            model, info = super().from_pretrained(  # type: ignore[misc]
                pretrained_model_name_or_path, *args, output_loading_info=True, use_safetensors=True, **kwargs
            )
        except (SafetensorError, RuntimeError) as error:
            damaged = _damaged_file(pretrained_model_name_or_path)
            if damaged is not None:
                raise ValueError(f"{damaged[0]} is damaged ({damaged[1]}); copy or download it again") from error
            raise
        if strict:
            if lets_shapes_differ:
                info = {**info, "mismatched_keys": []}
            check_loading_info(cls.__name__, pretrained_model_name_or_path, info)
        return (model, info) if wants_info else model  # type: ignore[return-value]

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As in transformers; also writes what :func:`add_auto_map` does, and README.md (a model card) if there is none."""
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if (Path(save_directory) / "config.json").is_file():
            add_auto_map(Path(save_directory))
        readme = Path(save_directory) / "README.md"
        if readme.parent.is_dir() and not readme.exists():
            readme.write_text(model_card(self), encoding="utf-8")  # type: ignore[arg-type]

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: transformers would copy our source code into every folder that is saved."""


def add_auto_map(folder: Path) -> None:
    """Let tools that never import efla open the folder with ``trust_remote_code=True``.

    The module that config.json names imports efla; transformers says ``pip install efla`` where it is missing.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {auto: f"{_MODULE}.{name}" for auto, name in AUTO_CLASSES.items()}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    line = f"from efla import {', '.join(sorted(AUTO_CLASSES.values()))}  # noqa: F401  (pip install efla)\n"
    (folder / f"{_MODULE}.py").write_text(line, encoding="utf-8")


def check_loading_info(name: str, source: object, info: dict[str, Any]) -> None:
    """Raise if tensors are missing, unexpected or of another shape; heads of other tasks are ignored."""
    problems = []
    is_base = name == "EflaModel"
    for kind in ("missing_keys", "unexpected_keys"):
        own_head = "score." if name.endswith("SequenceClassification") else "lm_head."
        keys = sorted(info.get(kind) or [])
        if kind == "missing_keys":
            keys = [k for k in keys if not (own_head == "score." and k.startswith("score."))]
        else:
            keys = [k for k in keys if not k.startswith(_HEADS) or (k.startswith(own_head) and not is_base)]
        if keys:
            problems.append(f"{len(keys)} tensors {kind.split('_')[0]}: {_few(keys)}")
    mismatched = sorted(info.get("mismatched_keys") or [])
    if mismatched:
        shapes = [f"{k} is {list(theirs)} in the file, {list(ours)} in the config" for k, theirs, ours in mismatched]
        problems.append(_few(shapes))
    if problems:
        raise ValueError(
            f"the checkpoint {str(source)!r} does not fit {name}: {'; '.join(problems)}. Was it made with another "
            "config.json? (efla convert reads flash-linear-attention's; strict=False loads what fits)"
        )


def _damaged_file(source: object) -> tuple[Path, str] | None:
    """The first safetensors file in a folder that cannot be opened, and why."""
    folder = Path(str(source))
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        try:
            with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
                file.keys()
        except SafetensorError as error:
            return path, str(error)
    return None


def _few(names: list[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


_CARD = """\
---
library_name: transformers
pipeline_tag: {task}
tags:
- efla
- linear-attention
{tags}
---

# {title}

A model of the Python library `efla` (Exact Flow Linear Attention), {parameters:,} parameters.

| | |
| --- | --- |
| mixers | {mixers} |
| hidden size, layers | {hidden}, {layers} |
| vocabulary | {vocabulary:,} |
| state per sequence | {state:,} bytes, whatever its length{growth} |

```python
import efla  # pip install efla
from transformers import {auto}

model = {auto}.from_pretrained("path/or/name")
```

Without `import efla`, as in tools that load models by name, pass `trust_remote_code=True`.

What it was trained on, how it was evaluated and what it should not be used for: to be filled in by whoever trained it.
"""


def model_card(model: PreTrainedModel) -> str:
    """README.md of a saved model: what Hugging Face's hub reads, sizes, and how to load it."""
    config = cast("EflaConfig", model.config)
    mixers = cast("list[str]", config.mixers)
    counts = {name: mixers.count(name) for name in dict.fromkeys(mixers)}
    growth = cache_bytes_per_token(config)
    is_classifier = hasattr(model, "score")
    return _CARD.format(
        task="text-classification" if is_classifier else "text-generation",
        tags="\n".join(f"- {name.replace('_', '-')}" for name in counts if name != "efla") or "- exact-flow",
        title=f"{type(model).__name__}: {' + '.join(counts)}",
        parameters=parameter_count(model),
        mixers=", ".join(f"{count} of {name}" for name, count in counts.items()),
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        state=state_bytes(config),
        growth=f", and {growth:,} bytes for each token" if growth else "",
        auto="AutoModelForSequenceClassification" if is_classifier else "AutoModelForCausalLM",
    )
