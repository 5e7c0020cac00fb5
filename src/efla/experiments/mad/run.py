"""The MAD runs: a cell trains one arm on one setting with one rate, weight decay and seed, and scores it on the test set."""

import math
import time
from dataclasses import asdict, dataclass, field
from functools import lru_cache

import torch
from torch import nn

from efla.experiments.arms import ARMS
from efla.experiments.experiment import Cell, Experiment, Report, Work, grid_cells, shuffled_batches
from efla.experiments.mad.config import MadConfig
from efla.experiments.mad.model import NO_SCORE, TaskScore, build, evaluate, loss_of
from efla.experiments.mad.tasks import TASKS, MadData, Setting, generate, load
from efla.models.accounting import parameter_count
from efla.runs.provenance import backend_used
from efla.runs.records import Record
from efla.train.engine import Engine

LOWEST_RATE = 1e-6
"""Where the cosine schedule ends."""
_CURVE_POINTS = 100
_STEPS_BETWEEN_REPORTS = 10


@dataclass
class MadTraining:
    """Results of a run: evaluations (step, score), the training loss in windows, and how it ended."""

    steps: int = 0
    epochs: float = 0.0
    scores: list[tuple[int, TaskScore]] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    diverged_at: int | None = None
    stopped_early: bool = False
    train_seconds: float = 0.0
    eval_seconds: float = 0.0

    @property
    def best(self) -> tuple[int, TaskScore] | None:
        """The evaluation with the lowest test perplexity; ``None`` if none was finite."""
        finite = [item for item in self.scores if math.isfinite(item[1].perplexity)]
        return min(finite, key=lambda item: item[1].perplexity, default=None)


def rate_at(rate: float, progress: float, schedule: str) -> float:
    """The learning rate after a fraction of the budget: constant, or cosine from ``rate`` to 1e-6."""
    if schedule == "constant":
        return rate
    return LOWEST_RATE + (rate - LOWEST_RATE) * (1 + math.cos(math.pi * progress)) / 2


def train(
    model: nn.Module, data: MadData, config: MadConfig, *, rate: float, decay: float, seed: int, report: Report
) -> MadTraining:
    """AdamW until the budget is spent, the test accuracy exceeds ``stop_above``, or the loss is not finite.

    No clipping, no warm-up. A non-finite loss ends the run and is recorded; it is not an error.
    """
    setting, engine = data.setting, Engine.alone(config.device)
    device = engine.device
    inputs, targets = data.train_inputs.to(device), data.train_targets.to(device)
    test = (data.test_inputs.to(device), data.test_targets.to(device))
    model = model.to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay, fused=True
    )
    batch, budget = config.batch_of(setting.task), config.steps_of(setting)
    per_epoch = -(-len(inputs) // batch)
    every = config.evaluate_every or per_epoch
    window, recent = max(1, budget // _CURVE_POINTS), torch.zeros((), device=device)
    result, value, shown = MadTraining(), math.nan, {"accuracy": math.nan}
    clock = time.perf_counter()
    for step, (epoch, indices) in enumerate(shuffled_batches(seed, len(inputs), batch), start=1):
        if config.schedule != "constant":
            progress = epoch / config.epochs if config.epochs is not None else (step - 1) / budget
            optimizer.param_groups[0]["lr"] = rate_at(rate, progress, config.schedule)
        indices = indices.to(device)
        with engine.autocast(config.precision):
            loss = loss_of(model, inputs[indices], targets[indices])
        loss.backward()
        recent += loss.detach()
        if device.type == "cpu" or step % _STEPS_BETWEEN_REPORTS == 0:  # reading a loss makes a GPU wait
            value = float(loss.detach())
            if not math.isfinite(value):
                result.diverged_at = step
                break
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        result.steps, result.epochs = step, step / per_epoch
        if step % window == 0:
            result.losses.append((step, float(recent) / window))
            recent.zero_()
        if step % every == 0 or step == budget:
            result.train_seconds += time.perf_counter() - clock
            clock = time.perf_counter()
            model.eval()
            with engine.autocast(config.precision):
                score = evaluate(model, *test)
            model.train()
            result.scores.append((step, score))
            shown = {"accuracy": score.reference_accuracy}
            result.eval_seconds += time.perf_counter() - clock
            clock = time.perf_counter()
            if score.reference_accuracy > config.stop_above:
                result.stopped_early = step < budget
                break
        if step % _STEPS_BETWEEN_REPORTS == 0:
            report(step / budget, loss=value, **shown)
        if step == budget:
            break
    result.train_seconds += time.perf_counter() - clock
    return result


def summary(result: MadTraining) -> Record:
    """The numbers of a run at the evaluation with the lowest test perplexity ("best") and at the last one. A run whose loss
    became non-finite has no last one."""
    best = result.best
    last = result.scores[-1] if result.scores and result.diverged_at is None else None
    best_score, last_score = best[1] if best else NO_SCORE, last[1] if last else NO_SCORE
    return {
        "steps": result.steps,
        "epochs": round(result.epochs, 3),
        "best_step": best[0] if best else None,
        "reference_accuracy": best_score.reference_accuracy,
        "reference_accuracy_last": last_score.reference_accuracy,
        "token_accuracy": best_score.token_accuracy,
        "token_accuracy_last": last_score.token_accuracy,
        "test_loss": best_score.loss,
        "test_loss_last": last_score.loss,
        "test_perplexity": best_score.perplexity,
        "stopped_early": result.stopped_early,
        "diverged_at": result.diverged_at,
        "evaluations": [{"step": step, **asdict(score)} for step, score in result.scores],
        "losses": [[step, float(f"{loss:.6g}")] for step, loss in result.losses],
        "timing": {
            "train_seconds": round(result.train_seconds, 2),
            "eval_seconds": round(result.eval_seconds, 2),
            "seconds_per_step": round(result.train_seconds / max(1, result.steps), 5),
        },
    }


class Mad(Experiment[MadConfig]):
    """Six synthetic tasks, each of which tests one skill of a token mixer."""

    name = "mad"
    title = "MAD: six synthetic tasks"
    claim = "EFLA is better than DeltaNet on the six MAD tasks"
    places = dict.fromkeys("abc", "Section 4.5, MAD")
    config_class = MadConfig

    def cells(self) -> list[Cell]:
        """Settings are the outermost loop of a group and arms the innermost, so arms are compared early."""

        def settings(setting: str, seed: int, rate: float, decay: float, arm: str) -> Record:
            task, _, name = setting.partition("/")
            return {"task": task, "setting": name, "arm": arm, "rate": rate, "decay": decay, "seed": seed}

        return grid_cells(self.config.groups, ("settings", "seeds", "rates", "decays", "arms"), settings)

    def prepare(self) -> None:
        if self.config.data == "files":
            wanted = {(cell.settings["task"], cell.settings["setting"], cell.settings["seed"]) for cell in self.cells()}
            for task, name, seed in sorted(wanted):
                data_of(self.config, self.config.setting(task, name), seed)

    def work(self, cell: Cell) -> Work:
        from efla.experiments.mad.bench import work_of

        return work_of(self.config, cell)

    def run_cell(self, cell: Cell, report: Report) -> list[Record]:
        config, chosen = self.config, cell.settings
        setting = config.setting(chosen["task"], chosen["setting"])
        data = data_of(config, setting, chosen["seed"])
        model = build(config, setting, chosen["arm"], chosen["seed"])
        rates = {"rate": chosen["rate"], "decay": chosen["decay"]}
        numbers = summary(train(model, data, config, **rates, seed=chosen["seed"], report=report))
        attention = ARMS[chosen["arm"]].mixer == "attention"
        return [
            {
                "profile": config.profile,
                "shorthand": TASKS[setting.task],
                "parameters_of_task": asdict(setting),
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


@lru_cache(maxsize=2)  # the next arms train on the same data
def data_of(config: MadConfig, setting: Setting, seed: int) -> MadData:
    """The data of a setting, generated or read."""
    if config.data == "files":
        assert config.folder is not None
        return load(setting, config.folder, seed)
    return generate(setting, seed, bit_exact=config.bit_exact, guarantee_probe=config.guarantee_probe)
