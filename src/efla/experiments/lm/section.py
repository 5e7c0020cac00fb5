"""The section of the report on the language models: curves, bits by position, the paper's table beside ours."""

import math
from collections.abc import Sequence

from efla.evaluation.table import COLUMNS, PRINTED_AVERAGES, mean_accuracy, paper_rows
from efla.experiments.lm.claims import COMPARABILITY, METRICS, Runs, claims
from efla.experiments.lm.config import CHOICES, CONTROLS, PAIR
from efla.runs.chart import Chart, Figure, Guide, Point, Series, over_seeds, tidy
from efla.runs.names import name_of
from efla.runs.records import Record, number
from efla.runs.sections import Section, Table, applicable, budget, settings_table
from efla.runs.statistics import MISSING

_TALL = 50.0
"""Step sizes above this are drawn on a logarithmic axis."""
_NOTE = "Mean over seeds; the band is ± one standard deviation (no band: one seed)."


def sections(rows: Sequence[Record], source: str) -> list[Section]:
    """One section: curves, positions and step sizes; tables."""
    runs = Runs(rows)
    arms = [arm for arm in runs.arms if runs.at(arm)]
    tables = [
        _main_table(runs, arms), _choices(runs, arms), _rates(runs), _paper_table(runs), _keys(runs), _every_run(runs)
    ]  # fmt: skip
    sizes = sorted({int(row["parameters"]) for row in runs})
    parameters = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    data = sorted({f"{r['data']['corpus']} ({r['data']['source']}, digest {r['data']['digest']})" for r in runs})
    return [
        Section(
            key="lm",
            title=f"Language models over bytes ({runs[0]['profile']} profile)",
            source=source,
            question="Does a small language model predict text better with the exact step?",
            intro=(
                f"Models of {parameters} parameters, matched within 2 %, are trained on the same bytes in the same order: "
                f"{runs[0]['bytes_seen'] / 1e6:.2g} million of them. {COMPARABILITY}"
            ),
            claims=claims(rows),
            figures=[
                Figure("lm", "Every run, validation during training, length and keys", _NOTE, _charts(runs, arms))
            ],
            tables=[table for table in tables if table.rows],
            settings=settings_table(runs),
            data=[line + runs.missing_files() for line in data],
            budget=budget(runs),
            not_concluded=_not_concluded(runs),
        )
    ]


def _charts(runs: Runs, arms: Sequence[str]) -> list[Chart]:
    seen, bits = "million bytes seen", "bits per byte"
    validation, steps = (
        [over_seeds(arm, runs.over_bytes(arm, key), digits=3) for arm in arms] for key in ("validations", "largest_step_sizes")
    )  # fmt: skip
    positions = [over_seeds(arm, runs.over_positions(arm), digits=3) for arm in arms]
    tested = []  # a dot for every run, and their mean
    for arm in arms:
        found = runs.metric(arm, "bits")
        dots = [value for value in found.values if math.isfinite(value)]
        tested.append(Series(arm, name_of(arm), [Point(name_of(arm), found.mean, text=found.text(1, 4), seeds=dots)]))
    charts = [
        Chart("Test text, every run", "model", bits, tested, _y_range(tested), kind="dots"),
        Chart("Validation text", seen, bits, validation, _y_range(validation)),
    ]
    length = runs[0]["config"]["length"]
    where = [Guide("x", length, f"dashed: training length, {length}")]
    charts.append(
        Chart("Test text by position, state carried", "position", bits, positions, _y_range(positions), guides=where)
    )
    largest = max((p.high for one in steps for p in one.points if math.isfinite(p.high)), default=0.0)
    tall, limit = largest > _TALL, [Guide("y", 2, "dashed: explicit Euler is stable below 2")]
    ends = (0.1, 2 * largest) if tall else (0.0, 1.05 * max(largest, 2.0))
    charts.append(Chart("Raw keys on a validation batch", seen, "largest βλ", steps, ends, log_y=tall, guides=limit))
    return [chart for chart in charts if chart.shown]


def _y_range(series: Sequence[Series]) -> tuple[float, float]:
    """From the smallest to the largest value, with a margin."""
    values = [v for s in series for p in s.points for v in (p.y, *p.seeds) if math.isfinite(v)] or [0.0, 1.0]
    room = 0.05 * ((max(values) - min(values)) or 1.0)
    return (min(values) - room, max(values) + room)


def _main_table(runs: Runs, arms: Sequence[str]) -> Table:
    """One line per arm: mean and deviation over seeds, and the difference of bits to DeltaNet."""
    names, lines = runs.measured(), []
    for arm in arms:
        gap = runs.metric(arm, "bits", shared_with=PAIR[0]).mean - runs.metric(PAIR[0], "bits", shared_with=arm).mean
        difference = "" if arm == PAIR[0] or math.isnan(gap) else f"{gap:+.4f}"
        label = name_of(arm) + (", control" if arm in CONTROLS else "")
        mine = runs.at(arm)
        values = [runs.text(arm, name) for name in names]
        lines.append([label, str(len(mine)), f"{mine[0]['parameters']:,}", *values, difference])
    titles = [METRICS[name].title for name in names]
    title = f"Every model at peak rate {runs.rate:g}, mean ± deviation over seeds"
    return Table(title, ["model", "seeds", "parameters", *titles, "bits − DeltaNet, same seeds"], lines)  # noqa: RUF001


def _choices(runs: Runs, arms: Sequence[str]) -> Table:
    lines = []
    for task, column in CHOICES.items():
        found = [runs.choice(arm, task) for arm in arms]
        if not any(found):
            continue
        items = next(f[1] for f in found if f is not None)
        values = [_or_dash(None if f is None else 100 * f[0], ".1f") for f in found]
        lines.append([column.title, column.metric, str(items), f"{column.chance:.1f}", *values])
    title = "Multiple choice in %, one seed: expected at chance, a test of the scorer, not averaged"
    return Table(title, ["set", "metric", "items", "chance", *map(name_of, arms)], lines)


def _rates(runs: Runs) -> Table:
    arms = [arm for arm in runs.arms if sum(bool(runs.at(arm, rate)) for rate in runs.rates) > 1]
    lines = [[name_of(arm), *(runs.text(arm, "bits", rate) for rate in runs.rates)] for arm in arms]
    return Table("Test bits per byte by peak rate", ["model", *(f"{rate:g}" for rate in runs.rates)], lines)


def _paper_table(runs: Runs) -> Table:
    """The paper's numbers as printed, and the mean recomputed."""
    lines = []
    for size, tokens in (("340M", "8B"), ("1.3B", "50B")):
        for model, row in paper_rows(size).items():
            mean = mean_accuracy(row)
            printed = f"{PRINTED_AVERAGES[size][model]:.1f}"
            values = [f"{row[column.key]:g}" for column in COLUMNS]
            lines.append([f"{model}, {size}, {tokens} tokens", *values, printed, "" if mean is None else f"{mean:.2f}"])
    larger = 374e6 / max(row["parameters"] for row in runs)
    longer = 8e9 / max(row["bytes_seen"] for row in runs)
    title = (
        f"The paper's Table 1: at least {larger:,.0f} times the size and {longer:,.0f} times the tokens, other text: compare "
        "only the direction of differences"
    )
    return Table(title, ["model", *(c.title for c in COLUMNS), "Avg. printed", "mean of the 9"], lines)


def _keys(runs: Runs) -> Table:
    lines = []
    for row in runs:
        for layer in row.get("keys", {}).get("layers", ()):
            quantiles = [tidy(number(value)) for key in ("lam", "step_size") for value in layer[key]]
            run = [name_of(row["arm"]), f"{row['rate']:g}", str(row["seed"])]
            lines.append([*run, str(layer["layer"] + 1), *quantiles])
    columns = ["model", "rate", "seed", "layer", "λ 50 %", "99 %", "largest", "βλ 50 %", "99 %", "largest"]
    return Table("Energy of raw keys by layer, on one validation batch", columns, lines)


def _every_run(runs: Runs) -> Table:
    columns = ["model", "rate", "seed", "test bits", "validation bits", "WikiText ppl", "LAMBADA ppl", "LAMBADA acc, %",
               "non-finite steps", "steps/s", "bytes/s", "memory growth, MB", "backend", "wall, s"]  # fmt: skip
    lines = []
    for row in runs:
        wiki, lambada, timing = row.get("wikitext", {}), row.get("lambada", {}), row["timing"]
        lines.append(
            [name_of(row["arm"]), f"{row['rate']:g}", str(row["seed"]), _or_dash(row["test"]["bits"], ".4f"),
             _or_dash(row["validation"]["bits"], ".4f"), _or_dash(wiki.get("word_perplexity"), ",.0f"),
             _or_dash(lambada.get("perplexity"), ",.0f"), _or_dash(lambada.get("accuracy"), ".2f", 100),
             str(row["nonfinite_steps"]), f"{timing['steps_per_second']:.2f}", f"{timing['bytes_per_second']:,.0f}",
             _or_dash(timing["peak_memory_growth"], ",.0f", 1e-6), row["backend"], f"{row['wall_seconds']:,.0f}"]
        )  # fmt: skip
    return Table("Every run", columns, lines)


def _or_dash(value: object, digits: str, unit: float = 1.0) -> str:
    return MISSING if value is None else f"{unit * number(value):{digits}}"


def _not_concluded(runs: Runs) -> list[str]:
    """The limits of these rows, derived from them."""
    single = ", ".join(name_of(arm) for arm in runs.arms if len(runs.at(arm)) == 1)
    failed = ", ".join(f"{name_of(arm)} ({n})" for arm, n in runs.failures().items())
    chance, substitute = runs.chance_sentence(), {row["data"]["corpus"] for row in runs} == {"python-docs"}
    return applicable(
        (single, f"Any verdict on {single}: run with one seed, so the spread is unknown."),
        (True, "Anything about 340M or 1.3B parameters: size, tokens and text differ, so only the direction of a difference "
               "compares."),
        (True, "That a difference between EFLA and DeltaNet is due to the rule: they differ in rule and key norm at once. "
               f"The controls {' and '.join(map(name_of, CONTROLS))} change one of the two."),
        (True, "That WikiText's and LAMBADA's numbers mean anything by themselves: they are out of domain for these texts and "
               "read in windows of the training length (the paper's: 2,048 tokens). They test the code path and the order of "
               "the arms."),
        (len(runs.rates) == 1, "That the order of the arms holds at other learning rates: one peak rate was run (--lr-sweep adds "
                               "two for the pair)."),
        (failed, f"How good the arms are where they failed: {failed} run(s) had a non-finite step."),
        (chance, f"Anything from multiple choice: {chance}."),
        (substitute, "Anything about the texts of the protocol: Python's documentation replaces them here."),
    )  # fmt: skip
