"""``efla convert``: checkpoints between flash-linear-attention and this library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro


def convert(source: Annotated[Path, tyro.conf.Positional], target: Annotated[Path, tyro.conf.Positional]) -> int:
    """Convert a checkpoint folder between flash-linear-attention and efla; the source's config.json says which way.

    From flash-linear-attention (delta_net, gated_deltanet, mamba2, transformer; also transformers' mamba2) to efla, and from
    efla to flash-linear-attention where it has a counterpart.

    Args:
        source: Folder with config.json and *.safetensors.
        target: New folder for the result.
    """
    from efla.models.convert import convert_folder

    config = convert_folder(source, target)
    mixers = config.get("mixers")
    print(
        f"{target}: model_type {config['model_type']}"
        + (f", layers {', '.join(dict.fromkeys(mixers))}" if mixers else "")
    )
    return 0
