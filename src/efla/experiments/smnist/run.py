"""The sequential MNIST runs: a cell trains one arm and scores it on clean and corrupted test images."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from efla.errors import check_names
from efla.experiments.experiment import Cell, Experiment, Report, Work, grid_cells, shuffled_batches
from efla.experiments.smnist import claims
from efla.experiments.smnist import data as smnist
from efla.experiments.smnist.config import CHANCE_LOSS, LEVELS, SmnistConfig
from efla.experiments.smnist.model import AuthorsClassifier, Model, build, optimizer_of
from efla.models.accounting import parameter_count
from efla.runs.provenance import backend_used
from efla.runs.records import Record

_EVAL_BATCH = 50  # 10 MB a tensor: larger ones leave the cache
_FORWARD = 0.3
"""Time of a forward pass as a share of a training step."""
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


def perturb(pixels: NDArray[np.float32], kind: str, level: float) -> NDArray[np.float32]:
    """Corrupt all test images, [n, L] in [0, 1], at one level, without rescaling or clipping.

    dropout p: keep each pixel with probability 1 - p, else 0;   scale s: s * pixel;   noise sigma: pixel + sigma N(0, 1)

    The random field is the same for every arm, seed and profile: its seed is 1234 and the indices of kind and level in
    ``LEVELS``, and it is drawn for all images in order. Pass the whole test set and select a subset afterwards.
    """
    check_names("kind of corruption", [kind], LEVELS)
    generator = np.random.default_rng([1234, list(LEVELS).index(kind), LEVELS[kind].index(level)])
    if kind == "dropout":
        return pixels * (generator.random(pixels.shape, dtype=np.float32) >= level)
    if kind == "scale":
        return pixels * np.float32(level)
    return pixels + np.float32(level) * generator.standard_normal(pixels.shape, dtype=np.float32)


def _test2k(count: int) -> Tensor:
    """Indices of test2k among that many test images: every fifth of 10,000, all of a smaller set."""
    return torch.arange(0, count, 5 if count >= 10_000 else 1)


@dataclass
class Data:
    """Sequences and labels of one profile: training images in a fixed order, and all test images."""

    train_x: Tensor
    train_y: Tensor
    test_x: NDArray[np.float32]
    test_y: Tensor
    subset: Tensor
    """Indices of test2k."""
    file_order: Tensor = field(default_factory=lambda: torch.arange(0))
    """Indices that put the training images back into the order of their file."""

    @classmethod
    def of(cls, mnist: smnist.Mnist, config: SmnistConfig) -> Data:
        most = len(mnist.train)
        count = most if config.train_images is None else config.train_images
        if not config.batch <= count <= most:
            limits = f"the batch size, {config.batch}, and the {most} training images of the source"
            raise ValueError(f"train_images must lie between {limits}, got {count}")
        order = np.random.default_rng(0).permutation(len(mnist.train))[:count]
        return cls(
            train_x=torch.from_numpy(smnist.sequences(mnist.train.pixels[order], config.length)),
            train_y=torch.from_numpy(mnist.train.labels[order].astype(np.int64)),
            test_x=smnist.sequences(mnist.test.pixels, config.length),
            test_y=torch.from_numpy(mnist.test.labels.astype(np.int64)),
            subset=_test2k(len(mnist.test)),
            file_order=torch.from_numpy(np.argsort(order)),
        )

    def indices(self, which: str) -> Tensor:
        return self.subset if which == "test2k" else torch.arange(len(self.test_y))


@dataclass
class SmnistTraining:
    """Results of a training run: the loss of every step, accuracies during training, and statistics."""

    losses: list[float] = field(default_factory=list)
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    diverged_at: int | None = None
    clipped: int = 0
    largest_step_size: float = 0.0
    seconds: float = 0.0
    scan_seconds: float = 0.0
    right: list[tuple[int, int]] = field(default_factory=list)
    """Per step, the number of correct images before the update, and of all images."""
    step_distributions: list[Record] = field(default_factory=list)
    """:func:`step_distribution` of eleven batches during training (authors' blocks)."""


@dataclass(frozen=True)
class ImageScore:
    """Accuracy (an image with a non-finite logit is wrong), share of such images, and beta * lam over tokens."""

    accuracy: float
    nonfinite: float
    median_step_size: float
    largest_step_size: float
    right: Tensor
    """Whether each image is classified correctly."""


def batches(model: Model, data: Data, config: SmnistConfig, seed: int) -> Iterator[Tensor]:
    """Indices of the training images of every step, pass after pass, the same for every arm.

    The authors' blocks read all images in the order of their script's DataLoader, so the last batch of a pass is smaller;
    ours leave it out.
    """
    count = len(data.train_y)
    if isinstance(model, AuthorsClassifier):
        generator = torch.Generator().manual_seed(model.order_seed)
        while True:
            yield from data.file_order[torch.randperm(count, generator=generator)].split(config.batch)
    for _, indices in shuffled_batches(seed, count, config.batch, drop_last=True):
        yield indices


def train(model: Model, data: Data, config: SmnistConfig, rate: float, seed: int, report: Report) -> SmnistTraining:
    """AdamW at a constant rate with clipped gradients. A non-finite loss ends the run and is recorded."""
    optimizer, result = optimizer_of(model, config, rate), SmnistTraining()
    for step, picked in zip(range(config.steps), batches(model, data, config, seed), strict=False):
        if isinstance(model, AuthorsClassifier) and step % max(1, config.steps // 10) == 0:
            result.step_distributions.append({"step": step} | step_distribution(model, data.train_x[picked]))
        clock, model.probe.scan_seconds = time.perf_counter(), 0.0
        logits, labels = model(data.train_x[picked]), data.train_y[picked]
        loss = functional.cross_entropy(logits, labels)
        value = float(loss.detach())
        result.largest_step_size = max(result.largest_step_size, float(model.probe.pop().max()))
        if not math.isfinite(value):
            result.diverged_at = step
            break
        result.losses.append(value)
        result.right.append((int((logits.argmax(1) == labels).sum()), len(labels)))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        result.clipped += not float(norm) <= config.clip
        optimizer.step()
        result.seconds += time.perf_counter() - clock
        result.scan_seconds += model.probe.scan_seconds
        if config.accuracy_every and (step + 1) % config.accuracy_every == 0 and step + 1 < config.steps:
            score = evaluate(model, torch.from_numpy(data.test_x)[data.subset], data.test_y[data.subset])
            result.accuracies.append((step + 1, score.accuracy))
        shown = {"accuracy": result.accuracies[-1][1]} if result.accuracies else {}
        report(0.9 * (step + 1) / config.steps, loss=value, **shown)
    return result


@torch.no_grad()
def evaluate(model: Model, x: Tensor, y: Tensor) -> ImageScore:
    """Score a model on sequences [n, L] with labels [n]."""
    model.probe.keep_all = True
    right, bad = torch.zeros(len(y), dtype=torch.bool), 0
    for start in range(0, len(y), _EVAL_BATCH):
        part = slice(start, start + _EVAL_BATCH)
        logits = model(x[part])
        finite = logits.isfinite().all(1)
        right[part] = finite & (logits.argmax(1) == y[part])
        bad += int((~finite).sum())
    model.probe.keep_all = False
    sizes = model.probe.pop()
    return ImageScore(int(right.sum()) / len(y), bad / len(y), float(sizes.median()), float(sizes.max()), right)


@torch.no_grad()
def step_distribution(model: AuthorsClassifier, x: Tensor) -> Record:
    """Distribution of a model's steps on sequences [n, L]: quantiles over tokens of beta, of |k| before normalisation and
    of beta * lam, and the share of tokens whose Euler step, beta * lam, is more than 5 % longer than the exact step,
    1 - exp(-beta * lam)."""
    _, k, _, beta = model.project(x)
    norm = k.norm(dim=-1, keepdim=True)
    step_size = beta if model.arm.l2_keys else beta * norm.square()
    exact = -torch.expm1(-step_size)
    levels = torch.tensor(QUANTILES)
    return {
        **{
            name: [float(f"{value:.4g}") for value in torch.quantile(values.flatten(), levels).tolist()]
            for name, values in (("beta", beta), ("key_norm", norm), ("step_size", step_size))
        },
        "euler_off_by_5_percent": float((step_size - exact > 0.05 * exact).float().mean()),
    }


def summary(result: SmnistTraining, config: SmnistConfig) -> Record:
    """The numbers of a run. Final loss and accuracy before the update are means over the last tenth of the steps; in the
    first pass, that accuracy is on images not seen before."""
    last_tenth = slice(-max(1, config.steps // 10), None)
    tail, right = result.losses[last_tenth], result.right[last_tenth]
    diverged = result.diverged_at is not None
    final = math.nan if diverged or not tail else float(np.mean(tail))
    return {
        "final_loss": final,
        "diverged": diverged or not final <= CHANCE_LOSS,
        "diverged_at": result.diverged_at,
        "losses": [float(f"{loss:.6g}") for loss in result.losses],
        "accuracy_before_update": sum(count for count, _ in right) / max(1, sum(total for _, total in right)),
        "step_distributions": result.step_distributions,
        "clip_share": result.clipped / max(1, len(result.losses)),
        "largest_step_size": result.largest_step_size,
        "timing": {
            "train_seconds": round(result.seconds, 2),
            "images_per_second": round(len(result.losses) * config.batch / max(result.seconds, 1e-9), 1),
            "scan_share": round(result.scan_seconds / max(result.seconds, 1e-9), 3),
        },
    }


class SmnistRobustness(Experiment[SmnistConfig]):
    """Sequential MNIST under pixel dropout, intensity scaling and noise."""

    name = "smnist"
    title = "Sequential MNIST under corruption"
    claim = "EFLA is more robust than DeltaNet to scaled, noisy and dropped pixels"
    places = dict.fromkeys("ab", "Section 4.3, figure on sMNIST")
    config_class = SmnistConfig

    @classmethod
    def folder_name(cls) -> str:
        return "smnist"  # the learning-rate experiment reads the same runs

    def cells(self) -> list[Cell]:
        """Arms are the innermost loop, so the first cells already compare all of them."""

        def settings(block: str, rate: float, seed: int, arm: str) -> Record:
            return {"block": block, "arm": arm, "rate": rate, "seed": seed}

        return grid_cells(self.config.groups, ("settings", "rates", "seeds", "arms"), settings)

    def prepare(self) -> None:
        Data.of(smnist.load(self.config.dataset, self.config.folder), self.config)

    def work(self, cell: Cell) -> Work:
        from efla.experiments.smnist.bench import Stepper

        config, (block, arm, rate) = self.config, (cell.settings[key] for key in ("block", "arm", "rate"))
        total = len(smnist.load(config.dataset, config.folder).test)
        images = {"all": total, "test2k": len(_test2k(total))}
        scored = images[config.clean_on]
        if rate in config.perturbed_rates:
            scored += images[config.perturbed_images(block, arm, rate)] * sum(map(len, config.levels().values()))
        if config.accuracy_every:
            scored += images["test2k"] * (config.steps // config.accuracy_every)
        steps = config.steps + _FORWARD * scored / config.batch
        return Work(steps, f"{block} {arm}", lambda: Stepper(config, arm, block))

    def run_cell(self, cell: Cell, report: Report) -> list[Record]:
        config, settings = self.config, cell.settings
        mnist, data = _data(config)
        model = build(config, settings["block"], settings["arm"], settings["seed"])
        result = train(model, data, config, settings["rate"], settings["seed"], report)
        model.eval()
        every = torch.from_numpy(data.test_x)
        picked = data.indices(config.clean_on)
        clean = evaluate(model, every[picked], data.test_y[picked])
        report(0.92, loss=result.losses[-1] if result.losses else float("nan"), accuracy=clean.accuracy)
        rows = []
        if settings["rate"] in config.perturbed_rates:
            images = config.perturbed_images(settings["block"], settings["arm"], settings["rate"])
            rows = self._corrupted(model, data, images, clean if images == config.clean_on else None, report)
        about = {"length": config.length, "steps": config.steps}
        rows = [row | about for row in rows]
        rows.append(
            about
            | {
                "parameters": parameter_count(model),
                "backend": backend_used(config.backend, width=config.width // config.heads),
                "clean_accuracy": clean.accuracy,
                "clean_nonfinite": clean.nonfinite,
                "clean_images": len(picked),
                "accuracies": result.accuracies,
                "data": {
                    "description": mnist.description, "digest": mnist.digest, "source": mnist.source,
                    "train": len(data.train_y), "test": len(data.test_y),
                },
                **summary(result, config),
                "show": {"loss": result.losses[-1] if result.losses else float("nan"), "accuracy": clean.accuracy},
            }
        )  # fmt: skip
        return rows

    def _corrupted(
        self, model: Model, data: Data, images: str, clean: ImageScore | None, report: Report
    ) -> list[Record]:
        """One row per kind and level: accuracy, share of non-finite rows, beta * lam. Retention is relative to the first
        level, at which nothing is corrupted. clean: the score at that level, if known."""
        picked, rows = data.indices(images), []
        labels = data.test_y[picked]
        total = sum(map(len, self.config.levels().values()))
        for kind, levels in self.config.levels().items():
            first = None
            for level in levels:
                x = torch.from_numpy(perturb(data.test_x, kind, level))
                score = evaluate(model, x[picked], labels) if clean is None or level != levels[0] else clean
                first = score.accuracy if first is None else first
                rows.append(
                    {
                        "row": "level", "kind": kind, "level": level, "accuracy": score.accuracy,
                        "retention": score.accuracy / first if first else None, "nonfinite": score.nonfinite,
                        "median_step_size": score.median_step_size, "largest_step_size": score.largest_step_size,
                        "images": len(labels),
                    }
                )  # fmt: skip
                if isinstance(model, AuthorsClassifier):
                    within = data.subset if images == "all" else slice(None)
                    rows[-1]["accuracy_test2k"] = float(score.right[within].double().mean())
                    rows[-1]["step_distribution"] = step_distribution(model, x[data.subset[::10]])
                report(0.92 + 0.08 * len(rows) / total, accuracy=score.accuracy)
        return rows


@cache
def _data(config: SmnistConfig) -> tuple[smnist.Mnist, Data]:
    mnist = smnist.load(config.dataset, config.folder)
    return mnist, Data.of(mnist, config)


class LearningRateRobustness(SmnistRobustness):
    """Loss and accuracy against the learning rate, from the same runs as the robustness experiment."""

    name = "lr"
    title = "Learning-rate robustness"
    claim = "EFLA is less sensitive to the learning rate"
    places = dict.fromkeys("cde", "Section 4.4, learning rates")

    @classmethod
    def text_summary(cls, rows: Sequence[Record], verbose: bool = False) -> str:
        return claims.rates_summary(rows, verbose)
