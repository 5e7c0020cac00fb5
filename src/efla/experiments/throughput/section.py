"""The section of the report on throughput: tokens per second by shape, ratios of the pairs, memory."""

from collections.abc import Sequence

from efla.experiments.throughput import claims
from efla.runs.chart import Chart, Figure, Guide, Point, Series
from efla.runs.names import name_of
from efla.runs.records import Record
from efla.runs.sections import Section, Table, applicable, budget, settings_table


def sections(rows: Sequence[Record], source: str) -> list[Section]:
    """One section: bars of throughput, ratios, tables."""
    cells = claims.sorted_cells(rows)
    config, device = cells[0]["config"], cells[0]["device"]
    where = cells[0]["machine"].get("processor", "CPU") if device == "cpu" else device
    note = "Medians over rounds; marks are quartiles. Arms take turns within a round."
    return [
        Section(
            key="throughput",
            title=f"Training throughput ({config['profile']} profile)",
            source=source,
            question="Does the exact step slow training down?",
            intro=(
                "A training step (forward, backward, clipping, AdamW) of every arm in turn at the same number of tokens: "
                f"{where}, {cells[0]['threads']} thread(s), {config['precision']}, models of size {config['size']}."
            ),
            claims=claims.claims(rows),
            figures=[Figure("throughput", "Tokens per second, and EFLA over DeltaNet", note, _charts(cells))],
            tables=_tables(cells),
            settings=settings_table(cells),
            data=["Random tokens; the time of a step does not depend on the text."],
            budget=budget(cells),
            not_concluded=_not_concluded(device, config),
        )
    ]


def _charts(cells: Sequence[Record]) -> list[Chart]:
    speed = [
        Series(arm, name_of(arm), [_point(claims.name(row), claims.tokens_per_second(row, arm), 0) for row in cells])
        for arm in claims.arms_of(cells)
    ]
    ratios = []
    for ours, theirs in claims.pairs_of(cells):
        drawn = [_point(float(row["length"]), claims.quartiles(claims.ratios(row, ours, theirs))) for row in cells]
        ratios.append(Series(ours, f"{name_of(ours)} over {name_of(theirs)}", drawn))
    top = max((p.high for one in speed for p in one.points), default=1.0)
    ends = [end for one in ratios for p in one.points for end in (p.low, p.high)]
    y_range = min([0.9, *ends]), max([1.1, *ends])
    lengths = sorted({float(row["length"]) for row in cells})
    near = [Guide("y", 1 - claims.NEAR, f"dashed: {claims.NEAR:.0%} below and above 1"), Guide("y", 1 + claims.NEAR)]
    return [
        Chart("Training throughput", "length × rows", "tokens per second", speed, (0, 1.05 * top), kind="bars"),  # noqa: RUF001
        Chart("Ratio of throughputs (band: quartiles)", "length of a row", "EFLA over DeltaNet", ratios, y_range,
              log_x=len(lengths) > 1, x_ticks=lengths, guides=near),
    ]  # fmt: skip


def _point(x: float | str, found: claims.Quartiles, digits: int = 3) -> Point:
    return Point(x, found.median, found.low, found.high, found.text(digits))


def _tables(cells: Sequence[Record]) -> list[Table]:
    shapes = [claims.name(row) for row in cells]
    speed = claims.lines_of(cells, lambda row, arm: claims.tokens_per_second(row, arm).text(0))
    for pair in claims.pairs_of(cells):
        ratios = (claims.quartiles(claims.ratios(row, *pair)).text() for row in cells)
        speed.append([" over ".join(map(name_of, pair)), *ratios])
    counts = {name_of(arm): f"{cells[0]['arms'][arm]['parameters']:,}" for arm in claims.arms_of(cells)}
    memory = [[arm, counts[arm], *values] for arm, *values in claims.lines_of(cells, claims.memory)]
    operations = "Useful operations per second, 10⁹: tokens per second times three forward passes' operations a token"
    growth = "Growth of memory in a step at its peak, MB (weights and optimizer not counted)"
    return [
        Table("Tokens per second: median (quartiles)", ["model", *shapes], speed),
        Table(operations, ["model", *shapes], claims.lines_of(cells, claims.operations)),
        Table(growth, ["model", "parameters", *shapes], memory),
    ]


def _not_concluded(device: str, config: Record) -> list[str]:
    is_small = config["size"] in ("quick", "full")
    return applicable(
        (device == "cpu",
         "Anything about a GPU, which the paper's figure is about: the same command times a GPU if there is one."),
        (True, "Which arm is fastest elsewhere: the numbers hold for this machine, these kernels and this size."),
        (True, "How fast the machine can be, unless nothing else ran; the ratio within a round is affected least."),
        (is_small, "Anything about the paper's sizes: these models have heads of width 64 and a vocabulary of 256."),
    )  # fmt: skip
