"""The throughput runs. A cell times a training step of all arms in turn at one length and batch."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from efla import EflaForCausalLM
from efla.experiments.experiment import Cell, Experiment, Report
from efla.experiments.throughput.config import Shape, ThroughputConfig
from efla.models.accounting import flops_per_token, parameter_count
from efla.runs.provenance import PeakMemory
from efla.runs.records import Record
from efla.runs.timing import samples_in_turn
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
        return [Cell(shape._asdict()) for shape in self.config.settings]

    def run_cell(self, cell: Cell, report: Report) -> list[Record]:
        """All models stay in memory, so that a round can go from one arm to the next."""
        config, shape = self.config, Shape(**cell.settings)
        arms: Record = {}
        steps, memory = {}, {}
        for number, arm in enumerate(config.arms, start=1):
            model, step = build_step(config, arm, shape)
            step()
            model.zero_grad(set_to_none=True)  # gradients count as memory of the step
            peak = PeakMemory(config.device)
            step()
            memory[arm] = peak.growth()
            steps[arm] = step
            context = shape.length // 2  # softmax layers see half a row on average
            arms[arm] = {
                "parameters": parameter_count(model),
                "flops_per_token": 3 * flops_per_token(model.config, context),
            }
            report(0.2 * number / len(config.arms))
        samples = samples_in_turn(
            steps, config.rounds, alternate=True, done=lambda n: report(0.2 + 0.8 * n / config.rounds)
        )
        first = sorted(samples[config.arms[0]])[config.rounds // 2]
        tokens = shape.length * shape.batch
        return [
            {
                "tokens": tokens,
                "arms": arms,
                "timing": {
                    arm: {"seconds": [round(s, 6) for s in times], "peak_memory_growth": memory[arm]}
                    for arm, times in samples.items()
                },
                # Of a CPU, the row's "machine" has the name.
                "device": torch.cuda.get_device_name() if config.device.startswith("cuda") else "cpu",
                "show": {"tokens_per_second": tokens / first},
            }
        ]


def build_step(config: ThroughputConfig, arm: str, shape: Shape) -> tuple[Any, Callable[[], float]]:
    """A model and a callable that runs one training step of it: forward, backward, clipping, AdamW.

    The device has finished when the step returns.
    """
    engine = Engine.alone(config.device)
    torch.manual_seed(0)
    model: Any = EflaForCausalLM(config.model_config(arm))
    model.to(engine.device)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, model.config.vocab_size, (shape.batch, shape.length), generator=generator)
    rows, optimizer = rows.to(engine.device), build_optimizer(model)

    @torch.enable_grad()
    def step() -> float:
        result = train_step(model, optimizer, [rows], rate=1e-5, precision=config.precision, engine=engine)
        if not result.applied:
            raise RuntimeError(f"a step of {arm} is not finite (loss {result.loss}), so its time means nothing")
        if engine.device.type == "cuda":
            torch.cuda.synchronize()  # the optimizer runs asynchronously
        return result.loss

    return model, step
