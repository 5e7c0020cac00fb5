"""The section of the report on throughput: tokens per second by shape, ratios of the pairs, memory."""

from collections.abc import Callable, Sequence

from efla.experiments.throughput import claims
from efla.runs.bars import Bars, BarSeries
from efla.runs.chart import Chart, Point, Series
from efla.runs.records import Record
from efla.runs.sections import Figure, Section, Table, budget, settings_table
from efla.runs.style import ARMS


def sections(rows: Sequence[Record], source: str) -> list[Section]:
    """One section: bars of throughput, ratios, tables."""
    cells = claims.sorted_cells(rows)
    config, device = cells[0]["config"], cells[0]["device"]
    where = cells[0]["machine"].get("processor", "CPU") if device == "cpu" else device
    legend = [Series(arm, ARMS[arm].label, [], ARMS[arm].dash, ARMS[arm].width) for arm in claims.arms_of(cells)]
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
            claims=claims.claims(rows),
            figures=[Figure("Tokens per second, and EFLA over DeltaNet", note, _charts(cells), legend)],
            tables=_tables(cells),
            settings=settings_table(cells),
            data=["Random tokens; the time of a step does not depend on the text."],
            budget=budget(cells),
            not_concluded=_not_concluded(device, config),
        )
    ]


def _charts(cells: Sequence[Record]) -> list[Chart | Bars]:
    speed = [
        BarSeries(arm, ARMS[arm].label, [_point(0.0, claims.tokens_per_second(row, arm), 0) for row in cells])
        for arm in claims.arms_of(cells)
    ]
    ratios = []
    for ours, theirs in claims.pairs_of(cells):
        drawn = [_point(float(row["length"]), claims.ratio(row, ours, theirs)) for row in cells]
        ratios.append(Series(ours, f"{ours} over {theirs}", drawn, ARMS[ours].dash, ARMS[ours].width))
    top = max((p.high for series in speed for p in series.points if p is not None), default=1.0)
    unit = 10 ** (len(str(int(top))) - 1)
    ends = [end for series in ratios for p in series.points for end in (p.low, p.high)]
    y_range = min([0.9, *ends]), max([1.1, *ends])
    lengths = sorted({float(row["length"]) for row in cells})
    title, is_log = "Ratio of throughputs (band: quartiles)", len(lengths) > 1
    return [
        Bars("Training throughput", "length × rows", "tokens per second", [claims.name(row) for row in cells], speed,  # noqa: RUF001
             float(unit * (int(top / unit) + 1))),
        Chart(title, "length of a row", "EFLA over DeltaNet", ratios, y_range, log_x=is_log, x_ticks=lengths),
    ]  # fmt: skip


def _point(x: float, found: claims.Quartiles, digits: int = 3) -> Point:
    return Point(x, found.median, found.low, found.high, found.text(digits))


def _tables(cells: Sequence[Record]) -> list[Table]:
    shapes = [claims.name(row) for row in cells]

    def lines(text: Callable[[Record, str], str]) -> list[list[str]]:
        return [[arm, *(text(row, arm) for row in cells)] for arm in claims.arms_of(cells)]

    speed = lines(claims.speed_text)
    for ours, theirs in claims.pairs_of(cells):
        speed.append([f"{ours} over {theirs}", *(claims.ratio(row, ours, theirs).text() for row in cells)])
    memory = [[arm, f"{cells[0]['arms'][arm]['parameters']:,}", *values] for arm, *values in lines(claims.memory_text)]
    operations = "Useful operations per second, 10⁹: tokens per second times three forward passes' operations a token"
    growth = "Growth of memory in a step at its peak, MB (weights and optimizer not counted)"
    return [
        Table("Tokens per second: median (quartiles)", ["arm", *shapes], speed),
        Table(operations, ["arm", *shapes], lines(claims.operations_text)),
        Table(growth, ["arm", "parameters", *shapes], memory),
    ]


def _not_concluded(device: str, config: Record) -> list[str]:
    found = [
        "Which arm is fastest elsewhere: the numbers hold for this machine, these kernels and this size.",
        "How fast the machine can be, unless nothing else ran; the ratio within a round is affected least.",
    ]
    if device == "cpu":
        found.insert(
            0, "Anything about a GPU, which the paper's figure is about: the same command times a GPU if there is one."
        )
    if config["size"] in ("quick", "full"):
        found.append("Anything about the paper's sizes: these models have heads of width 64 and a vocabulary of 256.")
    return found
