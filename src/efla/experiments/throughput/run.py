"""The throughput runs: one cell times a training step of all arms in turn at one length and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from efla import EflaForCausalLM
from efla.experiments.experiment import Cell, Experiment, Report
from efla.experiments.throughput.config import Setting, ThroughputConfig
from efla.models.accounting import flops_per_token
from efla.runs.memory import PeakMemory
from efla.runs.records import Record
from efla.runs.timing import Contender, samples_in_turn
from efla.train.engine import Engine
from efla.train.optimizer import build_optimizer
from efla.train.step import train_step


class Throughput(Experiment[ThroughputConfig]):
    """The paper's throughput figure."""

    name = "throughput"
    title = "Training throughput"
    claim = "EFLA trains at nearly the same throughput as DeltaNet"
    places: ClassVar[dict[str, str]] = {"a": "Section 4.6, throughput figure", "b": "Abstract, conclusion"}
    config_class = ThroughputConfig
    side_by_side = False

    def cells(self) -> list[Cell]:
        return [Cell({"length": setting.length, "batch": setting.batch}) for setting in self.config.settings]

    @property
    def gpus_per_cell(self) -> float:
        return 1.0 if self.config.device.startswith("cuda") else 0.0

    def run_cell(self, cell: Cell, report: Report) -> list[Record]:
        """Models stay in memory together, so that rounds can go from one arm to the next."""
        config, setting = self.config, Setting(**cell.settings)
        facts: Record = {}
        contenders, memory = [], {}
        for number, arm in enumerate(config.arms):
            model, step = stepper(config, arm, setting)
            step()
            model.zero_grad(set_to_none=True)  # gradients belong to a step, not to what was there before it
            peak = PeakMemory(config.device)
            step()
            memory[arm] = peak.growth()
            contenders.append(Contender(arm, step))
            context = setting.length // 2  # softmax layers see half a row on average
            facts[arm] = {
                "parameters": sum(p.numel() for p in model.parameters()),
                "flops_per_token": 3 * flops_per_token(model.config, context),
            }
            report(0.2 * (number + 1) / len(config.arms))
        samples = samples_in_turn(
            contenders, config.rounds, alternate=True, done=lambda n: report(0.2 + 0.8 * n / config.rounds)
        )
        first = sorted(samples[config.arms[0]])[config.rounds // 2]
        return [
            {
                "tokens": setting.length * setting.batch,
                "arms": facts,
                "timing": {
                    arm: {"seconds": [round(s, 6) for s in times], "peak_memory_growth": memory[arm]}
                    for arm, times in samples.items()
                },
                "device": device_name(config.device),
                "show": {"tokens_per_second": setting.length * setting.batch / first},
            }
        ]


def stepper(config: ThroughputConfig, arm: str, setting: Setting) -> tuple[Any, Callable[[], object]]:
    """A model and one training step of it (forward, backward, clipping, AdamW), as training does it.

    The step reads the loss and the norm, so that the device has finished when it returns.
    """
    engine = Engine.alone(config.device)
    torch.manual_seed(0)
    model: Any = EflaForCausalLM(config.model_config(arm))
    model.to(engine.device)
    optimizer = build_optimizer(model)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, model.config.vocab_size, (setting.batch, setting.length), generator=generator)
    rows = rows.to(engine.device)

    @torch.enable_grad()
    def step() -> object:
        result = train_step(model, optimizer, [rows], rate=1e-5, precision=config.precision, engine=engine)
        if not result.applied:
            raise RuntimeError(f"a step of {arm} was not finite (loss {result.loss}); its time means nothing")
        if engine.device.type == "cuda":
            torch.cuda.synchronize()  # the optimizer's own work
        return result

    return model, step


def device_name(device: str) -> str:
    """The GPU's name; for a CPU the row's ``machine`` says it."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
