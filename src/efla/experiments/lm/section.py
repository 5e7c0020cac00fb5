"""The language-model section of the report: curves, bits by position, the paper's table beside ours."""

from __future__ import annotations

import math
from collections.abc import Sequence

from efla.evaluation.table import COLUMNS, PRINTED_AVERAGES, mean_accuracy, paper_rows
from efla.experiments.lm import claims as lm_claims
from efla.experiments.lm import select
from efla.experiments.lm.config import CONTROLS, PAIR
from efla.runs.chart import Chart, Series, tidy
from efla.runs.records import Record, number
from efla.runs.sections import Figure, Section, Table, budget, points, settings_table
from efla.runs.statistics import Spread
from efla.runs.style import ARMS

_NOTE = "Mean over seeds; the band is ± one standard deviation (no band: one seed)."


def sections(rows: Sequence[Record], source: str) -> list[Section]:
    """One section: curves, positions and step sizes; tables."""
    cells = select.runs(rows)
    arms = [arm for arm in select.arms_of(rows) if select.chosen(rows, arm)]
    legend = [_series(arm, [], []) for arm in arms]
    tables = [_main_table(rows, arms)]
    if any("choices" in row for row in cells):
        tables.append(_choices(rows, arms))
    if len(select.rates_of(rows)) > 1:
        tables.append(_rates(rows))
    tables.append(_paper_table(cells))
    if any("keys" in row for row in cells):
        tables.append(_keys(cells))
    tables.append(_runs(cells))
    data = sorted({f"{r['data']['corpus']} ({r['data']['source']}, digest {r['data']['digest']})" for r in cells})
    return [
        Section(
            key="lm",
            title=f"Language models over bytes ({cells[0]['profile']} profile)",
            source=source,
            intro=(
                f"Models of {_range(cells)} parameters, matched within 2 %, are trained on the same bytes in the same order: "
                f"{cells[0]['bytes_seen'] / 1e6:.2g} million of them. {lm_claims.COMPARABILITY}"
            ),
            claims=lm_claims.claims(rows),
            figures=[Figure("Training, length and keys", _NOTE, _charts(rows, arms), legend)],
            tables=tables,
            settings=settings_table(cells),
            data=[line + lm_claims.without_files(cells) for line in data],
            budget=budget(cells),
            not_concluded=_not_concluded(rows, cells),
        )
    ]


def _charts(rows: Sequence[Record], arms: Sequence[str]) -> list[Chart]:
    validation = [_against_bytes(rows, arm, "validations") for arm in arms]
    training = [_against_bytes(rows, arm, "losses") for arm in arms]
    position = [_series(arm, *select.positions(rows, arm)) for arm in arms]
    steps = [_against_bytes(rows, arm, "largest_step_sizes") for arm in arms]
    charts = [
        Chart("Training text", "million bytes seen", "bits per byte", training, _y_range(training)),
        Chart("Validation text", "million bytes seen", "bits per byte", validation, _y_range(validation)),
    ]
    drawn = [series for series in position if series.points]
    if drawn:
        length = select.runs(rows)[0]["config"]["length"]
        title = f"Test text by position (trained on {length}), state carried"
        charts.append(Chart(title, "position", "bits per byte", drawn, _y_range(drawn)))
    drawn = [series for series in steps if series.points]
    if drawn:
        charts.append(
            Chart("Raw keys on a validation batch", "million bytes seen", "largest βλ", drawn, _y_range(drawn, 0.0))
        )
    return charts


def _series(arm: str, x: Sequence[float], curve: Sequence[Spread]) -> Series:
    line = ARMS[arm]
    return Series(arm, line.label, points(x, curve, 1.0, 3), line.dash, line.width)


def _against_bytes(rows: Sequence[Record], arm: str, key: str) -> Series:
    seen, values = select.curve(rows, arm, key)
    return _series(arm, [at / 1e6 for at in seen], values)


def _y_range(series: Sequence[Series], low: float | None = None) -> tuple[float, float]:
    """From the smallest to the largest value, with some room."""
    values = [p.y for s in series for p in s.points if math.isfinite(p.y)] or [0.0, 1.0]
    bottom = min(values) if low is None else low
    room = 0.05 * ((max(values) - bottom) or 1.0)
    return (bottom - room if low is None else bottom, max(values) + room)


def _main_table(rows: Sequence[Record], arms: Sequence[str]) -> Table:
    """One line per arm: mean and deviation over seeds, and the difference to delta-l2 in the headline."""
    names = [name for name in select.METRICS if any(select.over_seeds(rows, arm, name).n for arm in arms)]
    lines = []
    for arm in arms:
        gap = select.over_seeds(rows, arm, "bits", shared_with=PAIR[0]).mean
        gap -= select.over_seeds(rows, PAIR[0], "bits", shared_with=arm).mean
        difference = "" if arm == PAIR[0] or math.isnan(gap) else f"{gap:+.4f}"
        label = f"{arm} (control)" if arm in CONTROLS else arm
        mine = select.chosen(rows, arm)
        values = [select.show(rows, arm, name) for name in names]
        lines.append([label, str(len(mine)), f"{mine[0]['parameters']:,}", *values, difference])
    titles = [select.METRICS[name].title for name in names]
    title = f"Every arm at peak rate {select.judged_rate(rows):g}, mean ± deviation over seeds"
    return Table(title, ["arm", "seeds", "parameters", *titles, "bits − delta-l2, same seeds"], lines)  # noqa: RUF001


def _choices(rows: Sequence[Record], arms: Sequence[str]) -> Table:
    lines = []
    for task, column in select.CHOICES.items():
        found = [select.choice(rows, arm, task) for arm in arms]
        items = next((f[1] for f in found if f is not None), 0)
        values = ["–" if f is None else f"{100 * f[0]:.1f}" for f in found]  # noqa: RUF001
        lines.append([column.title, column.metric, str(items), f"{column.chance:.1f}", *values])
    title = "Multiple choice in %, one seed: expected at chance, a test of the scorer, not averaged"
    return Table(title, ["set", "metric", "items", "chance", *arms], lines)


def _rates(rows: Sequence[Record]) -> Table:
    rates = select.rates_of(rows)
    arms = [a for a in select.arms_of(rows) if sum(bool(select.chosen(rows, a, rate)) for rate in rates) > 1]
    lines = [[arm, *(select.show(rows, arm, "bits", rate) for rate in rates)] for arm in arms]
    return Table("Test bits per byte by peak rate", ["arm", *(f"{rate:g}" for rate in rates)], lines)


def _paper_table(cells: Sequence[Record]) -> Table:
    """The paper's numbers as printed; the mean recomputed."""
    lines = []
    for size, tokens in (("340M", "8B"), ("1.3B", "50B")):
        for model, row in paper_rows(size).items():
            mean = mean_accuracy(row)
            printed = f"{PRINTED_AVERAGES[size][model]:.1f}"
            values = [f"{row[column.key]:g}" for column in COLUMNS]
            lines.append([f"{model}, {size}, {tokens} tokens", *values, printed, "" if mean is None else f"{mean:.2f}"])
    size = 374e6 / max(row["parameters"] for row in cells)
    tokens_more = 8e9 / max(row["bytes_seen"] for row in cells)
    title = (
        f"The paper's Table 1: at least {size:,.0f} times the size and {tokens_more:,.0f} times the tokens, other text: only "
        "signs compare"
    )
    return Table(title, ["model", *(c.title for c in COLUMNS), "Avg. printed", "mean of the 9"], lines)


def _keys(cells: Sequence[Record]) -> Table:
    lines = []
    for row in cells:
        for record in row.get("keys", {}).get("layers", ()):
            lam, step = ([tidy(number(v)) for v in record[key]] for key in ("lam", "step_size"))
            lines.append([row["arm"], f"{row['rate']:g}", str(row["seed"]), str(record["layer"] + 1), *lam, *step])
    columns = ["arm", "rate", "seed", "layer", "λ 50 %", "99 %", "largest", "βλ 50 %", "99 %", "largest"]
    return Table("Energy of raw keys by layer, on one validation batch", columns, lines, wide=True)


def _runs(cells: Sequence[Record]) -> Table:
    columns = ["arm", "rate", "seed", "test bits", "validation bits", "WikiText ppl", "LAMBADA ppl", "LAMBADA acc, %",
               "non-finite steps", "steps/s", "bytes/s", "memory growth, MB", "backend", "wall, s"]  # fmt: skip
    lines = []
    for row in cells:
        wiki, lambada, timing = row.get("wikitext"), row.get("lambada"), row["timing"]
        memory = timing["peak_memory_growth"]
        lines.append(
            [row["arm"], f"{row['rate']:g}", str(row["seed"]), f"{number(row['test']['bits']):.4f}",
             f"{number(row['validation']['bits']):.4f}", "–" if wiki is None else f"{number(wiki['word_perplexity']):,.0f}",  # noqa: RUF001
             "–" if lambada is None else f"{number(lambada['perplexity']):,.0f}",  # noqa: RUF001
             "–" if lambada is None else f"{100 * number(lambada['accuracy']):.2f}", str(row["nonfinite_steps"]),  # noqa: RUF001
             f"{timing['steps_per_second']:.2f}", f"{timing['bytes_per_second']:,.0f}",
             "–" if memory is None else f"{memory / 1e6:,.0f}", row["backend"], f"{row['wall_seconds']:,.0f}"]  # noqa: RUF001
        )  # fmt: skip
    return Table("Every run", columns, lines, wide=True)


def _range(cells: Sequence[Record]) -> str:
    counts = sorted({int(row["parameters"]) for row in cells})
    return f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"


def _not_concluded(rows: Sequence[Record], cells: Sequence[Record]) -> list[str]:
    """The limits of these rows, worked out from them."""
    found = [
        "Anything about 340M or 1.3B parameters: size, tokens and text differ, so only signs may be set beside the paper's.",
        "That a difference between exact-flow and delta-l2 is due to the rule: they differ in rule and key norm at once. "
        "The controls delta-raw and exact-flow-l2 change one of the two.",
        "That WikiText's and LAMBADA's numbers mean anything by themselves: they are out of domain for these texts, read in "
        "windows of the training length (the paper's: 2,048 tokens), and kept for the code path and the order of the arms.",
    ]
    single = [arm for arm in select.arms_of(rows) if len(select.chosen(rows, arm)) == 1]
    if single:
        found.insert(0, f"Any verdict on {', '.join(single)}: run with one seed, so the spread is unknown.")
    if len(select.rates_of(rows)) == 1:
        found.append(
            "That the order of the arms holds at other learning rates: one peak rate was run (--lr-sweep adds two for the pair)."
        )
    nonfinite = [f"{arm} ({n})" for arm in select.arms_of(rows) if (n := select.failed(rows, arm))]
    if nonfinite:
        found.append(
            f"How good these arms are where they failed: {', '.join(nonfinite)} run(s) had a step that was not finite."
        )
    sentence = lm_claims.chance_sentence(rows)
    if sentence:
        found.append(f"Anything from multiple choice: {sentence}.")
    if {row["data"]["corpus"] for row in cells} == {"python-docs"}:
        found.append("Anything about the texts of the protocol: Python's documentation stood in for them.")
    return found
