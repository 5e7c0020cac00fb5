"""The first screen of the report, from the claims of its sections: the answer, what was found, what was not run."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from efla.experiments import registry
from efla.runs.chart import Figure
from efla.runs.sections import Section
from efla.runs.statistics import NOT_JUDGED, Claim, grouped


class Unreachable(NamedTuple):
    """A claim that this page cannot test, and the recipe of ``efla train`` that would."""

    place: str
    sentence: str
    recipe: str


_HEADLINE = "smnist"
"""The experiment of the key figure: accuracy against corruption."""
UNREACHABLE = (
    Unreachable("Table 1, 340M", "At 340M parameters and 8B tokens EFLA has WikiText 35.26, DeltaNet 38.09", "efla-340m-paper"),
    Unreachable("Table 1, 340M", "Gated EFLA 34.28, Gated DeltaNet 34.93", "gated-efla-340m-paper"),
    Unreachable("Table 1, 1.3B", "At 1.3B and 50B tokens EFLA has WikiText 18.30, DeltaNet 18.38", "efla-1.3b-paper"),
)  # fmt: skip


class ClaimLine(NamedTuple):
    """A claim of the paper by its first comparison; ``others`` counts the verdicts of the rest."""

    claim: Claim
    place: str
    others: str
    anchor: str


def claim_lines(sections: Sequence[Section]) -> list[ClaimLine]:
    """A line for each claim of the sections that has a place in the paper."""
    lines = []
    for number, section in enumerate(sections, start=1):
        places = places_of(section)
        for first, comparisons in grouped(section.claims):
            if first.letter in places:
                rest = Counter(claim.verdict for claim in comparisons[1:])
                others = ", ".join(f"{count} {verdict}" for verdict, count in rest.items())
                lines.append(ClaimLine(first, places[first.letter], others, f"#{section.key}-{number}"))
    return lines


def answer(lines: Sequence[ClaimLine]) -> str:
    """The report in one sentence; with one seed it is what was measured, and that it gives no verdict."""
    if not lines:
        return ""
    counts = Counter(line.claim.verdict for line in lines)
    ordered = sorted(
        lines, key=lambda line: (line.claim.difference is None, not line.anchor.startswith(f"#{_HEADLINE}"))
    )
    lead = ordered[0].claim
    if set(counts) == {NOT_JUDGED}:
        return f"Measured: {lead.pair}, {lead.text()}. One seed gives no verdict."
    parts = [f"{count} {'is' if count == 1 else 'are'} {verdict}" for verdict, count in counts.most_common()]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    size = f" ({lead.difference.text(lead.unit)})" if lead.difference else ""
    return f"Of {len(lines)} claims of the paper tested here, {listed}. “{lead.sentence}”: {lead.verdict}{size}."


def findings(section: Section) -> list[tuple[str, str]]:
    """The first two claims of a section: verdict and sentence with its numbers; no verdict if the section has none."""
    shown = [first for first, _ in grouped(section.claims)][:2]
    judged = is_judged(section.claims)
    return [(first.verdict if judged else "", f"{first.sentence} ({first.pair}): {first.text()}.") for first in shown]


def is_judged(claims: Iterable[Claim]) -> bool:
    """Whether any of the claims has a verdict."""
    return any(claim.verdict != NOT_JUDGED for claim in claims)


def headline(sections: Sequence[Section]) -> Figure | None:
    """The key figure: accuracy against corruption if it was measured, else the first one; at most three charts of it."""
    ordered = sorted(sections, key=lambda section: section.key != _HEADLINE)
    figure = next((figure for section in ordered for figure in section.figures if figure.legend), None)
    return figure and Figure(figure.name, figure.title, figure.note, figure.charts[:3])


def by_unit(lines: Sequence[ClaimLine]) -> dict[str, list[Claim]]:
    """The claims that a forest plot can show, by the unit of their difference: their interval gives their verdict."""
    found: dict[str, list[Claim]] = {}
    for claim in (line.claim for line in lines):
        size = claim.difference
        if size is not None and size.low <= size.high and size.verdict == claim.verdict:
            found.setdefault(claim.unit, []).append(claim)
    return found


def places_of(section: Section) -> Mapping[str, str]:
    """Letter of a claim -> where the paper makes it; empty for sections of evaluations."""
    return registry.get(section.key).places if section.key in registry.names() else {}


def not_run(sections: Sequence[Section]) -> list[tuple[str, str]]:
    """Claims of experiments without rows in this report, with the command that runs them."""
    missing = [name for name in registry.names() if name not in {section.key for section in sections}]
    return [(registry.get(name).claim, f"efla reproduce {name}") for name in missing]


def claim_cells(claim: Claim) -> tuple[str, ...]:
    """A comparison as the cells of a table: pair, verdict, difference, n, detectable, the paper's difference, reason."""
    found, head = claim.difference, (claim.pair, f"**{claim.verdict}**")
    if found is None:
        return *head, "", "", "", "", claim.reason
    shown, _, detectable = found.text(claim.unit).partition(", detectable ")
    interval = shown.rpartition(", n = ")[0] or shown
    paper = "" if claim.paper is None else f"{claim.paper:+.1f}"
    return *head, interval, str(found.n), detectable, paper, claim.reason


def unreachable() -> list[tuple[str, str, str]]:
    """Claims at the paper's scale: place and sentence, the command, and an estimate of its cost in GPU-hours."""
    from efla.models.accounting import flops_per_token
    from efla.train import recipes
    from efla.train.estimate import DEVICES, Machines

    found = []
    for claim in UNREACHABLE:
        config = recipes.get(claim.recipe)
        flops = 3 * flops_per_token(config.model_config(), config.data.length // 2) * config.total_tokens
        hours = flops / (DEVICES["a100"] * 1e12 * Machines().utilisation) / 3600
        cost = f"{flops:.2g} operations for one model, about {hours:,.0f} A100-hours at {Machines().utilisation:.0%} of the peak"
        found.append((f"{claim.place}: {claim.sentence}", f"efla train --recipe {claim.recipe}", cost))
    return found
