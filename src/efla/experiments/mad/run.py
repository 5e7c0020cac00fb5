"""The MAD runs: one cell trains one arm on one setting with one rate, weight decay and seed; rows only, no figures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from efla.experiments.experiment import Cell, Experiment, Report, grid_cells
from efla.experiments.mad import tasks as mad
from efla.experiments.mad.config import ARMS, MadConfig
from efla.experiments.mad.model import build, parameter_count
from efla.experiments.mad.tasks import MadData, Setting
from efla.experiments.mad.train import summary, train
from efla.runs.provenance import backend_used
from efla.runs.records import Record


class Mad(Experiment[MadConfig]):
    """Six synthetic tasks that take a token mixer apart."""

    name = "mad"
    title = "MAD: six synthetic tasks"
    config_class = MadConfig

    def cells(self) -> list[Cell]:
        """Group by group; inside one, settings outermost and arms innermost, so that arms are compared early."""

        def settings(setting: str, seed: int, rate: float, decay: float, arm: str) -> Record:
            task, _, name = setting.partition("/")
            return {"task": task, "setting": name, "arm": arm, "rate": rate, "decay": decay, "seed": seed}

        return grid_cells(self.config.groups, ("settings", "seeds", "rates", "decays", "arms"), settings)

    def prepare(self) -> None:
        if self.config.data == "files":
            wanted = {(cell.settings["task"], cell.settings["setting"], cell.settings["seed"]) for cell in self.cells()}
            for task, name, seed in sorted(wanted):
                data_of(self.config, self.config.setting(task, name), seed)

    @property
    def gpus_per_cell(self) -> float:
        return self.config.gpu_share if self.config.device.startswith("cuda") else 0.0

    def expected_seconds(self, cells: Sequence[Cell], threads: int) -> list[float] | None:
        if self.config.device.startswith("cuda") and not torch.cuda.is_available():
            return None  # the cells run elsewhere
        from efla.experiments.mad.bench import expected_seconds

        return expected_seconds(self.config, cells, threads)

    def run_cell(self, cell: Cell, report: Report) -> list[Record]:
        config, chosen = self.config, cell.settings
        setting = config.setting(chosen["task"], chosen["setting"])
        data = data_of(config, setting, chosen["seed"])
        model = build(config, setting, chosen["arm"], chosen["seed"])
        result = train(
            model, data, config, rate=chosen["rate"], decay=chosen["decay"], seed=chosen["seed"], report=report
        )
        numbers = summary(result)
        attention = ARMS[chosen["arm"]].mixer == "attention"
        return [
            {
                "profile": config.profile,
                "shorthand": mad.TASKS[setting.task],
                "parameters_of_task": setting.record(),
                "heads": model.encoder.num_heads,
                "width": config.width,
                "batch": config.batch_of(setting.task),
                "budget": config.steps_of(setting),
                "schedule": config.schedule,
                "device": config.device,
                "precision": config.precision,
                "backend": "torch" if attention else backend_used(config.backend, config.device),
                "parameters": parameter_count(model),
                "data": {"source": data.source, "digest": data.digest()[:16], "overlap": data.overlap},
                **numbers,
                "show": {"accuracy": numbers["reference_accuracy"], "steps": numbers["steps"]},
            }
        ]


@lru_cache(maxsize=2)
def _data(setting: Setting, seed: int, folder: str | None, bit_exact: bool, guarantee_probe: bool) -> MadData:
    if folder is not None:
        return mad.load(setting, folder, seed)
    return mad.generate(setting, seed, bit_exact=bit_exact, guarantee_probe=guarantee_probe)


def data_of(config: MadConfig, setting: Setting, seed: int) -> MadData:
    """The sets of a setting, generated or read; the last two are kept, for the arms that come next."""
    folder = config.folder if config.data == "files" else None
    return _data(setting, seed, folder, config.bit_exact, config.guarantee_probe)
