"""Data sets written in the layout of the published ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from efla.experiments.mad.tasks import MadData, folder_name


def write_published(folder: Path, data: MadData) -> Path:
    """Both sets of a setting as the published archive stores them; returns the setting's folder."""
    place = folder / folder_name(data.setting)
    for split in ("train", "test"):
        (place / split).mkdir(parents=True)
        for kind in ("inputs", "targets"):
            array = getattr(data, f"{split}_{kind}").numpy().astype(np.int32)
            np.save(place / split / f"{kind}.npy", array)
    return place
