"""The throughput section of the report: tokens per second by setting, ratios of the pairs, memory."""

from __future__ import annotations

from collections.abc import Sequence

from efla.experiments.throughput import claims as throughput_claims
from efla.experiments.throughput import select
from efla.experiments.throughput.config import PAIRS
from efla.experiments.throughput.select import Quartiles
from efla.runs.bars import Bars, BarSeries
from efla.runs.chart import Chart, Point, Series
from efla.runs.records import Record
from efla.runs.sections import Figure, Section, Table, budget, settings_table
from efla.runs.style import ARMS


def sections(rows: Sequence[Record], source: str) -> list[Section]:
    """One section: bars of throughput and of ratios, tables."""
    cells = select.cells(rows)
    arms = select.arms_of(rows)
    config, device = cells[0]["config"], cells[0]["device"]
    where = cells[0]["machine"].get("processor", "CPU") if device == "cpu" else device
    names = [select.name(row) for row in cells]
    speed = [
        BarSeries(arm, ARMS[arm].label, [_point(select.tokens_per_second(row, arm), 0) for row in cells])
        for arm in arms
    ]
    ratios = [_ratios(cells, ours, theirs) for ours, theirs in PAIRS.items() if ours in arms and theirs in arms]
    lengths = sorted({float(row["length"]) for row in cells})
    top = max((p.high for series in speed for p in series.points if p is not None), default=1.0)
    charts: list[Chart | Bars] = [
        Bars("Training throughput", "length × rows", "tokens per second", names, speed, _round_up(top)),  # noqa: RUF001
        Chart(
            "Ratio of throughputs (band: quartiles)",
            "length of a row",
            "EFLA over DeltaNet",
            ratios,
            _ratio_range(ratios),
            log_x=len(lengths) > 1,
            x_ticks=lengths,
        ),
    ]
    legend = [Series(arm, ARMS[arm].label, [], ARMS[arm].dash, ARMS[arm].width) for arm in arms]
    note = "Medians over rounds; marks are quartiles. Arms take turns within a round."
    return [
        Section(
            key="throughput",
            title=f"Training throughput ({config['profile']} profile)",
            source=source,
            intro=(
                "A training step (forward, backward, clipping, AdamW) of every arm in turn at the same number of tokens: "
                f"{where}, {cells[0]['threads']} thread(s), {config['precision']}, models of size {config['size']}."
            ),
            claims=throughput_claims.claims(rows),
            figures=[Figure("Tokens per second, and EFLA over DeltaNet", note, charts, legend)],
            tables=[_speed(cells, arms), _operations(cells, arms), _memory(cells, arms)],
            settings=settings_table(cells),
            data=["Random tokens; the time of a step does not depend on the text."],
            budget=budget(cells),
            not_concluded=_not_concluded(device, config),
        )
    ]


def _point(found: Quartiles | None, digits: int) -> Point | None:
    return None if found is None else Point(0.0, found.median, found.low, found.high, found.text(digits))


def _ratios(cells: Sequence[Record], ours: str, theirs: str) -> Series:
    found = [(float(row["length"]), select.ratio(row, ours, theirs)) for row in cells]
    drawn = [Point(length, q.median, q.low, q.high, q.text()) for length, q in found if q is not None]
    return Series(ours, f"{ours} over {theirs}", drawn, ARMS[ours].dash, ARMS[ours].width)


def _ratio_range(series: Sequence[Series]) -> tuple[float, float]:
    """From 0.9 to 1.1, or as far as the quartiles go."""
    ends = [end for s in series for p in s.points for end in (p.low, p.high)]
    return min([0.9, *ends]), max([1.1, *ends])


def _round_up(value: float) -> float:
    unit = 10 ** (len(str(int(value))) - 1)
    return float(unit * (int(value / unit) + 1))


def _speed(cells: Sequence[Record], arms: Sequence[str]) -> Table:
    lines = []
    for arm in arms:
        values = [select.tokens_per_second(row, arm) for row in cells]
        lines.append([arm, *("–" if v is None else v.text(0) for v in values)])  # noqa: RUF001
    for ours, theirs in PAIRS.items():
        found = [select.ratio(row, ours, theirs) for row in cells]
        if any(found):
            lines.append([f"{ours} over {theirs}", *("–" if v is None else v.text(3) for v in found)])  # noqa: RUF001
    return Table("Tokens per second: median (quartiles)", ["arm", *(select.name(row) for row in cells)], lines)


def _operations(cells: Sequence[Record], arms: Sequence[str]) -> Table:
    lines = []
    for arm in arms:
        rates = [select.operations(row, arm) for row in cells]
        lines.append([arm, *("–" if v is None else f"{v / 1e9:,.1f}" for v in rates)])  # noqa: RUF001
    title = "Useful operations per second, 10⁹: tokens per second times three forward passes' operations a token"
    return Table(title, ["arm", *(select.name(row) for row in cells)], lines)


def _memory(cells: Sequence[Record], arms: Sequence[str]) -> Table:
    lines = []
    for arm in arms:
        sizes = [select.memory(row, arm) for row in cells]
        lines.append(
            [arm, f"{cells[0]['arms'][arm]['parameters']:,}", *("–" if v is None else f"{v / 1e6:,.0f}" for v in sizes)]  # noqa: RUF001
        )
    columns = ["arm", "parameters", *(select.name(row) for row in cells)]
    return Table("Growth of memory in a step at its peak, MB (weights and optimizer not counted)", columns, lines)


def _not_concluded(device: str, config: Record) -> list[str]:
    found = [
        "Which arm is fastest elsewhere: the numbers belong to this machine, these kernels and this size.",
        "How fast the machine is at its best, unless nothing else ran; the ratio within a round suffers least from it.",
    ]
    if device == "cpu":
        found.insert(
            0, "Anything about a GPU, which the paper's figure is about: the same command times one where there is one."
        )
    if config["size"] in ("quick", "full"):
        found.append("Anything about the paper's sizes: these models have heads of width 64 and a vocabulary of 256.")
    return found
