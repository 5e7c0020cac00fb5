"""The front page of the report: every claim of the paper in one table, our verdicts, and a strip of differences for each.

A strip shows each comparison of a claim at its difference in half widths of its 95 % interval, to the right if it agrees
with the paper. Differences inside the grey band count as none. Comparisons without an interval (one seed, or nothing
random) are squares in the column on the right.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from efla.experiments import registry
from efla.runs.sections import Section
from efla.runs.statistics import NOT_JUDGED, NOT_SEEN, NOT_TESTABLE, REVERSED, SEEN, Claim, grouped

VERDICTS = (SEEN, NOT_SEEN, REVERSED, NOT_JUDGED, NOT_TESTABLE)


class Unreachable(NamedTuple):
    """A claim that this page cannot test, and the recipe of ``efla train`` that would."""

    place: str
    sentence: str
    recipe: str


UNREACHABLE = (
    Unreachable("Table 1, 340M", "At 340M parameters and 8B tokens EFLA has WikiText 35.26, DeltaNet 38.09", "efla-340m-paper"),
    Unreachable("Table 1, 340M", "Gated EFLA 34.28, Gated DeltaNet 34.93", "gated-efla-340m-paper"),
    Unreachable("Table 1, 1.3B", "At 1.3B and 50B tokens EFLA has WikiText 18.30, DeltaNet 18.38", "efla-1.3b-paper"),
)  # fmt: skip


@dataclass(frozen=True)
class ClaimLine:
    """One line of the front page. ``verdict`` belongs to the first comparison; ``others`` counts the rest."""

    place: str
    sentence: str
    verdict: str
    others: str
    numbers: str
    strip: str
    anchor: str
    section: str


def front(sections: Sequence[Section]) -> list[ClaimLine]:
    """A line for each claim of the sections that has a place in the paper."""
    lines = []
    for number, section in enumerate(sections, start=1):
        for first, comparisons in grouped(section.claims):
            place = places_of(section).get(first.letter)
            if place is None:
                continue
            rest = Counter(claim.verdict for claim in comparisons[1:])
            lines.append(
                ClaimLine(
                    place=place,
                    sentence=first.sentence,
                    verdict=first.verdict,
                    others=", ".join(f"{count} {verdict}" for verdict, count in rest.items()),
                    numbers=_shortened(f"{first.pair}: {first.text()}"),
                    strip=strip(comparisons),
                    anchor=f"#{section.key}-{number}",
                    section=section.title,
                )
            )
    return lines


def places_of(section: Section) -> Mapping[str, str]:
    """Letter of a claim -> where the paper makes it; empty for sections of evaluations."""
    return registry.get(section.key).places if section.key in registry.names() else {}


def _shortened(text: str, limit: int = 240) -> str:
    """The text, cut after a part of the sentence if it is too long; the section has all of it."""
    if len(text) <= limit:
        return text
    cut = max(text.rfind("; ", 0, limit), text.rfind(", ", 0, limit))
    return text[: cut if cut > 0 else limit] + " …"


def not_run(sections: Sequence[Section]) -> list[tuple[str, str]]:
    """Claims of experiments without rows in this report, with the command that runs them."""
    missing = [name for name in registry.names() if name not in {section.key for section in sections}]
    return [(registry.get(name).claim, f"efla reproduce {name}") for name in missing]


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


def picture(sections: Sequence[Section]) -> str:
    """Verdicts by experiment as an SVG: one bar per section, one piece per comparison, coloured by its verdict."""
    shown = [section for section in sections if section.claims]
    if not shown:
        return ""
    widest = max(len(section.claims) for section in shown)
    left, row, piece = 300, 30, min(40.0, 440 / widest)
    height = row * len(shown) + 6
    told = []
    parts = []
    for number, section in enumerate(shown):
        y = row * number + 6
        claims = sorted(section.claims, key=lambda claim: VERDICTS.index(claim.verdict))
        counts = Counter(claim.verdict for claim in claims)
        told.append(f"{section.title}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
        parts.append(f'<text x="{left - 10}" y="{y + 14}" text-anchor="end">{escape(section.title)}</text>')
        for place, claim in enumerate(claims):
            x = left + piece * place
            title = f"<title>{escape(f'{claim.verdict}: {claim.sentence}; {claim.pair}')}</title>"
            shape = f"M{x + 1:.1f} {y + 1}h{piece - 3:.1f}v18h{3 - piece:.1f}Z"
            parts.append(f'<path class="mark {claim.verdict.replace(" ", "-")}" d="{shape}">{title}</path>')
    label = escape("Verdicts by experiment. " + "; ".join(told))
    return f'<svg class="picture" viewBox="0 0 760 {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


_WIDTH, _HEIGHT, _GUTTER, _REACH = 250, 24, 34, 8.0


def strip(comparisons: Sequence[Claim]) -> str:
    """The comparisons of one claim as a small SVG."""
    middle, end = (_WIDTH - _GUTTER) / 2, _WIDTH - _GUTTER
    per = (middle - 10) / _REACH
    y = _HEIGHT / 2
    parts = [
        f'<svg class="strip" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(_describe(comparisons))}">',
        f'<path class="none" d="M{middle - per:.1f} 2h{2 * per:.1f}v{_HEIGHT - 4}h{-2 * per:.1f}Z"/>',
        f'<line class="grid" x1="4" x2="{end - 4:.1f}" y1="{y}" y2="{y}"/>',
        f'<line class="axis" x1="{middle:.1f}" x2="{middle:.1f}" y1="2" y2="{_HEIGHT - 2}"/>',
    ]
    without = 0
    for claim in comparisons:
        kind = claim.verdict.replace(" ", "-")
        title = f"<title>{escape(f'{claim.verdict}: {claim.pair}')}</title>"
        effect = _effect(claim)
        if effect is None:
            column, row = without % 4, without // 4 % 3
            corner = f"M{end + 4 + 7 * column:.1f} {2 + 7 * row}"
            parts.append(f'<path class="mark {kind}" d="{corner}h5v5h-5Z">{title}</path>')
            without += 1
            continue
        at = max(-_REACH, min(_REACH, effect))
        x = middle + per * at
        if abs(effect) > _REACH:
            tip = 6 if effect > 0 else -6
            parts.append(
                f'<path class="mark {kind}" d="M{x:.1f} {y - 5}L{x + tip:.1f} {y}L{x:.1f} {y + 5}Z">{title}</path>'
            )
        else:
            parts.append(f'<circle class="mark {kind}" cx="{x:.1f}" cy="{y}" r="4.2">{title}</circle>')
    return "".join([*parts, "</svg>"])


def _describe(comparisons: Sequence[Claim]) -> str:
    return (
        f"{len(comparisons)} comparison(s): {'; '.join(claim.verdict + _by(_effect(claim)) for claim in comparisons)}"
    )


def _effect(claim: Claim) -> float | None:
    """The difference in half widths of its interval: beyond one, the interval excludes zero."""
    found = claim.difference
    if found is None or math.isnan(found.detectable):
        return None
    return (
        found.mean / found.detectable
        if found.detectable
        else math.copysign(math.inf, found.mean)
        if found.mean
        else 0.0
    )


def _by(effect: float | None) -> str:
    if effect is None:
        return ""
    if abs(effect) > _REACH:
        return f" by {'more' if effect > 0 else 'less'} than {math.copysign(_REACH, effect):+g} half widths"
    return f" by {effect:+.1f} half widths"
