"""The page of claims for the documentation: every comparison of every claim, made from rows."""

from collections.abc import Sequence

from efla.report.front import not_run, places_of, unreachable
from efla.runs.sections import Section
from efla.runs.statistics import NOT_TESTABLE, Claim, grouped

_HEADER = """\
# Claims and verdicts

Generated from rows by `efla report {folders} --markdown FILE`; do not edit.

**How a claim is judged.** The arms of a comparison share seeds (data order, corruption draws, and initial weights where shapes
allow), so each seed gives one difference, positive in the direction of the claim. The table shows the mean of these paired
differences, its 95 % interval (Student's t) and n, the number of pairs; seeds of one arm only are left out.

- *seen*: the interval lies above zero. *Reversed*: below zero. *Not seen*: it includes zero.
- *not judged*: fewer than two pairs. *Not testable here*: needs GPUs.
- *Detectable* is half the width of the interval, the smallest mean difference that this n and spread could have shown.
  *Needs about N seeds* is the number that would show the paper's difference (the observed one if the paper prints none) with a
  probability of 80 %, at the observed spread.
- Without an effect, *seen* is wrong in 2.5 % of cases (tested on 10,000 simulated sets of rows). The intervals are not
  corrected for the number of comparisons: of 40 comparisons without an effect, one is expected to be *seen*.
- A diverged run has the accuracy that its model reaches. A loss or score that is not finite loses its pair; then there is no
  interval, and a two-sided sign test at 5 % judges, which needs six pairs. Pairs in which both arms diverged do not count.
- A claim about several comparisons at once (all tasks, all rates, every setting) is *seen* if each of them is, *reversed* if
  each is reversed; the table shows the one whose interval reaches furthest against the claim.
- "Nearly the same throughput" is *seen* if the interval over rounds lies within ± 5 %. "The gain is largest on these two tasks"
  is the mean gain there minus that on the other four. "DeltaNet stops improving while EFLA reaches its best" is EFLA's gain
  from 3e-3 to 1e-2 minus DeltaNet's; it is *seen* if also EFLA's own gain is seen and its best rate is 1e-2.
- Accuracy under corruption is the plain mean over the corrupted levels. Exactness and parameter counts are computed, not sampled.

[The paper, claim by claim](paper.md) says what each claim means here."""


def markdown(sections: Sequence[Section]) -> str:
    """Every comparison of every claim: one table per section, with its budget; then what was not run."""
    folders = " ".join(dict.fromkeys(section.source for section in sections))
    parts = [_HEADER.format(folders=folders)]
    for section in sections:
        places = places_of(section)
        claims = [claim for claim in section.claims if claim.letter in places]
        if not claims:
            continue
        parts += [
            "",
            f"## {section.title}",
            "",
            f"`{section.source}` (`efla reproduce {section.key}`): {section.budget}",
        ]
        for first, comparisons in grouped(claims):
            parts += ["", f"**{first.sentence}** ({places[first.letter]})", ""]
            parts += [
                "| comparison | verdict | difference, 95 % interval | n | detectable | paper | reason |",
                f"|{' --- |' * 7}",
            ]
            parts += [
                "| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(claim)) + " |" for claim in comparisons
            ]
        parts += ["", "May not be concluded:", "", *(f"- {line}" for line in section.not_concluded)]
    parts += ["", f"## {NOT_TESTABLE.capitalize()}", ""]
    parts += [f"- {sentence}: `{command}`, {cost}." for sentence, command, cost in unreachable()]
    parts += [f"- Not in these results: {text} (`{command}`)." for text, command in not_run(sections)]
    return "\n".join(parts) + "\n"


def _cells(claim: Claim) -> tuple[str, ...]:
    found = claim.difference
    if found is None:
        return claim.pair, f"**{claim.verdict}**", "", "", "", "", claim.reason
    shown, _, detectable = found.text(claim.unit).partition(", detectable ")
    interval = shown.rpartition(", n = ")[0] or shown
    paper = "" if claim.paper is None else f"{claim.paper:+.1f}"
    return claim.pair, f"**{claim.verdict}**", interval, str(found.n), detectable, paper, claim.reason
