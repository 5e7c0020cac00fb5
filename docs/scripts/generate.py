"""Write what is generated: tables of README.md and of the pages on speed and on sequential MNIST, a figure, the pages of claims
and of the command line.

Run ``make readme``.

Speed comes from the rows of benchmarks/results (speed_tables.py), claims and figures from those of results/. New files there are
picked up.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import speed_tables
from speed_tables import ROOT, markdown_table

README, CLAIMS, COMMAND_LINE = ROOT / "README.md", ROOT / "docs/results/claims.md", ROOT / "docs/reference/cli.md"
SPEED, SMNIST = ROOT / "docs/explanation/speed.md", ROOT / "docs/results/smnist.md"
LM, MAD = ROOT / "docs/results/lm.md", ROOT / "docs/results/mad.md"

FOLDERS = ("exactness", "smnist-authors", "smnist", "lm", "throughput", "mad")
"""Beginnings of the folders of results/, in the order of the page; the first that makes a claim is the one README quotes."""


def claim_lines(sections: Sequence[Any]) -> list[Any]:
    """The claims of the paper, each once, by its first comparison."""
    from efla.report import front

    found: dict[tuple[str, str], Any] = {}
    for section in sections:
        for line in front.claim_lines([section]):
            if line.claim.letter in front.places_of(section):
                found.setdefault((section.key, line.claim.sentence), line)
    return list(found.values())


def claims_table(sections: Sequence[Any]) -> str:
    """A line per claim: the verdict, difference and number of pairs of its first comparison."""
    lines = [["claim of the paper", "verdict", "difference, 95 % interval", "n"], ["---"] * 4]
    for claim in (line.claim for line in claim_lines(sections)):
        shown, n = claim.reason, ""
        if claim.difference is not None:
            shown, n = claim.difference.text(claim.unit).partition(", n = ")[0], str(claim.difference.n)
        lines.append([claim.sentence, f"**{claim.verdict}**", shown, n])
    return markdown_table(lines)


def smnist_tables(folder: Path = ROOT / "results") -> dict[str, str]:
    """The tables of the page on sequential MNIST by their markers: published, changes, BLOCK-RATE and BLOCK-rates."""
    from efla.experiments.smnist.claims import conditions_of
    from efla.runs.rows import read_rows

    authors, full = (read_rows(folder / f"smnist-{name}") for name in ("authors", "full"))
    tables = {"published": _published(authors), "changes": _changes(authors)}
    for rows in (authors, full):
        for at in conditions_of(rows):
            tables[f"{at.block}-{at.rate:g}"] = _levels(rows, [("", at)])
    tables |= {f"{block}-rates": _rates(rows) for block, rows in (("authors", authors), ("bare", full))}
    tables["authors-differences"] = _differences(authors)
    page = SMNIST.read_text()
    return {name: table for name, table in tables.items() if f"<!-- {name} -->" in page}


def _published(rows: Sequence[Any]) -> str:
    """EFLA against DeltaNet on the authors' block: a line per claim, a column per comparison."""
    from efla.experiments.smnist.claims import corruption_claims

    lines: dict[str, list[str]] = {}
    comparisons: list[str] = []
    for claim in corruption_claims(rows):
        title = claim.pair.partition(", ")[2]
        if title in ("as published", "best rates") or title.startswith("both at"):
            comparisons.append(title)
            shown = claim.difference.text(claim.unit, short=True) if claim.difference else claim.reason
            lines.setdefault(claim.sentence, []).append(f"**{claim.verdict}**: {shown}")
    columns = ["claim of the paper", *dict.fromkeys(comparisons)]
    return markdown_table([columns, ["---"] * len(columns), *([sentence, *cells] for sentence, cells in lines.items())])


def _changes(rows: Sequence[Any]) -> str:
    """The main pair on the authors' block and on every block that changes one detail of it: same rate, seeds and images."""
    from efla.experiments.smnist.claims import Condition
    from efla.experiments.smnist.config import AUTHORS_ARMS, AUTHORS_CHANGES

    changed = [row for row in rows if row["block"] in AUTHORS_CHANGES]
    if not changed:
        return "Not run yet."
    seeds, (rate,) = ({row[key] for row in changed} for key in ("seed", "rate"))
    same = [row for row in rows if row["seed"] in seeds and row["arm"] in AUTHORS_ARMS]
    titles, run = {"authors": "none", **AUTHORS_CHANGES}, {row["block"] for row in same}
    conditions = [(title, Condition(block, rate)) for block, title in titles.items() if block in run]
    return _levels(same, conditions, "accuracy_test2k")


def _levels(rows: Sequence[Any], conditions: Sequence[tuple[str, Any]], accuracy: str = "accuracy") -> str:
    """A line per condition and arm: clean accuracy, means over corrupted levels, three intensities in percent, diverged runs."""
    from efla.experiments.smnist.claims import arms_of, level_means, levels_of, runs_of
    from efla.runs.names import name_of
    from efla.runs.statistics import Rows, spread

    titled = any(title for title, _ in conditions)
    lines = []
    for title, at in conditions:
        tests = Rows(rows).where(row="level", **at._asdict())
        intensities = (2, 4, max(tests.where(kind="scale").values("level")))
        for arm in arms_of(tests):
            runs = runs_of(rows, at, arm)
            bright = levels_of(rows, at, arm, "scale")
            scale, noise, dropout = (
                spread(level_means(levels_of(rows, at, arm, kind), accuracy).values())
                for kind in ("scale", "noise", "dropout")
            )
            each = [bright.where(level=level).spread(accuracy) for level in intensities]
            shown = [runs.spread("clean_accuracy"), scale, *each, noise, dropout]
            diverged = f"{len(runs.where(diverged=True))} of {len(runs)}"
            lines.append([*([title] * titled), name_of(arm), *(value.text(100) for value in shown), diverged])
    columns = ["arm", "clean", "intensity, mean", *(f"\N{MULTIPLICATION SIGN}{level:g}" for level in intensities)]
    columns = [*(["change"] * titled), *columns, "noise, mean", "dropout, mean", "diverged"]
    return markdown_table([columns, ["---"] * len(columns), *lines])


def _rates(rows: Sequence[Any]) -> str:
    """Final training loss and clean accuracy of the main block, a line per arm that has several rates and a column per rate."""
    from efla.experiments.smnist.claims import Condition, arms_of, main_block, rates_of, runs_of
    from efla.runs.names import name_of
    from efla.runs.statistics import Rows

    block, rates = main_block(rows), rates_of(rows)
    lines = [["arm", *(f"{rate:g}" for rate in rates)], ["---"] * (len(rates) + 1)]
    for arm in arms_of(Rows(rows).cells().where(block=block)):
        cells = []
        for rate in rates:
            runs = runs_of(rows, Condition(block, rate), arm)
            diverged = len(runs.where(diverged=True))
            shown = f"{runs.spread('final_loss').text(1, 3)}; {runs.spread('clean_accuracy').text(100)}"
            cells.append(shown + f"; {diverged} of {len(runs)} diverged" * bool(diverged) if runs else "")
        if sum(map(bool, cells)) > 1:
            lines.append([name_of(arm), *cells])
    return markdown_table(lines)


def _differences(rows: Sequence[Any]) -> str:
    """EFLA minus DeltaNet at every rate of the authors' block: corrupted levels of every fifth image, and clean accuracy."""
    from efla.experiments.smnist.claims import MAIN, OURS, Condition, level_means, levels_of, rates_of, runs_of
    from efla.runs.statistics import advantages, difference

    kinds = {"scale": "intensity, mean", "noise": "noise, mean", "dropout": "dropout, mean"}
    lines = [["rate", "n", *kinds.values(), "clean"], ["---"] * (len(kinds) + 3)]
    for rate in rates_of(rows, "authors"):
        at = Condition("authors", rate)
        pairs = [
            [level_means(levels_of(rows, at, arm, kind), "accuracy_test2k") for arm in (OURS, MAIN)] for kind in kinds
        ]
        pairs.append([{row["seed"]: row["clean_accuracy"] for row in runs_of(rows, at, arm)} for arm in (OURS, MAIN)])
        found = [difference(100 * value for value in advantages(*pair).values()) for pair in pairs]
        shown = (one.text("points", short=True).partition(", n")[0] for one in found)
        cells = (
            f"**{text}**" if one.verdict in ("seen", "reversed") else text
            for text, one in zip(shown, found, strict=True)
        )
        lines.append([f"{rate:g}", str(found[0].n), *cells])
    return markdown_table(lines)


def lm_tables(folder: Path = ROOT / "results/lm") -> dict[str, str]:
    """The tables of the page on language models by their markers."""
    from efla.experiments.lm.claims import METRICS, Runs, claims
    from efla.experiments.lm.config import CHOICES, PAIR
    from efla.runs.names import name_of
    from efla.runs.rows import read_rows

    rows = read_rows(folder)
    runs = Runs(rows)
    verdicts = [["claim of the paper", "comparison", "verdict", "difference, 95 % interval", "ours against theirs"]]
    before = ""
    for claim in claims(rows):
        shown = "" if claim.difference is None else claim.difference.text(claim.unit)
        sentence, before = "" if claim.sentence == before else claim.sentence, claim.sentence
        verdicts.append([sentence, claim.pair, f"**{claim.verdict}**", shown, claim.reason])

    titles = [METRICS[name].title for name in runs.measured()]
    models = [["arm", "seeds", "parameters", *titles, "bits \N{MINUS SIGN} DeltaNet, same seeds"]]
    positions: list[list[str]] = []
    keys = [["arm", "seeds", "layer", "\N{GREEK SMALL LETTER LAMDA}: median", "99 %", "largest"]]
    keys[0] += ["\N{GREEK SMALL LETTER BETA}\N{GREEK SMALL LETTER LAMDA}: median", "99 %", "largest"]
    for arm in runs.arms:
        mine, name = runs.at(arm), name_of(arm)
        pair = [runs.metric(a, "bits", shared_with=b).mean for a, b in ((arm, PAIR[0]), (PAIR[0], arm))]
        gap = "" if arm == PAIR[0] else f"{pair[0] - pair[1]:+.4f}"
        texts = (runs.text(arm, metric) for metric in runs.measured())
        models.append([name, str(len(mine)), f"{mine[0]['parameters']:,}", *texts, gap])
        ends, bits = runs.over_positions(arm)
        if ends and not positions:
            starts = [1, *(end + 1 for end in ends)]
            shown_at = [i for i, end in enumerate(ends) if end in (64, 128, 256, 512, 1024, 1536, 2048)]
            positions = [["arm", *(f"{starts[i]:,} to {ends[i]:,}" for i in shown_at)]]
        if ends:
            positions.append([name, *(bits[i].text(1, 3) for i in shown_at)])
        layers = [row["keys"]["layers"] for row in mine if "keys" in row]
        for layer, found in enumerate(zip(*layers, strict=True), start=1):
            cells = []
            for key in ("lam", "step_size"):
                median, high, largest = zip(*(one[key] for one in found), strict=True)
                cells += [f"{sum(v) / len(v):.3g}" for v in (median, high)] + [f"{max(largest):.3g}"]
            keys.append([name, str(len(layers)), str(layer), *cells])

    choices = [["set", "chance", *map(name_of, runs.arms)]]
    for task, column in CHOICES.items():
        scores = [runs.choice(arm, task) for arm in runs.arms]
        choices.append([column.title, f"{column.chance:.1f}", *(f"{100 * score[0]:.1f}" for score in scores if score)])
    tables = {"verdicts": verdicts, "models": models, "positions": positions, "keys": keys, "choices": choices}
    return {name: with_rule(lines) for name, lines in tables.items()}


def mad_tables(folder: Path = ROOT / "results/mad") -> dict[str, str]:
    """Scores of the baselines with the verdicts of both pairs, and of the hard settings, in percent."""
    from efla.experiments.mad.claims import PAIRS, Runs, claims
    from efla.runs.names import name_of
    from efla.runs.rows import read_rows
    from efla.runs.statistics import spread

    runs = Runs(read_rows(folder))
    arms = runs.arms
    found = {claim.pair: claim for claim in claims(runs)}
    pairs = {
        name_of(ours): f", {name_of(ours)} against {name_of(theirs)}" for ours, theirs in PAIRS if ours != "exact-flow"
    }
    against = {name_of(PAIRS[0][0]): "", **pairs}
    tables = {
        "baselines": [["task", *map(name_of, arms), *(f"{name} is better" for name in against)]],
        "hard": [["task"]],
    }
    trained = [arm for arm in arms if any(runs.scores(task, runs.settings(task)[-1], arm) for task in runs.tasks)]
    tables["hard"][0] += map(name_of, trained)
    for task in runs.tasks:
        base, *hard = runs.settings(task)
        verdicts = []
        for suffix in against.values():
            claim = found.get(f"{task} ({base}){suffix}")
            difference = claim.difference if claim else None
            verdicts.append(f"**{claim.verdict}**: {difference.text('points')}" if claim and difference else "")
        scores = (spread(runs.scores(task, base, arm).values()).text(100) for arm in arms)
        tables["baselines"].append([task, *scores, *verdicts])
        for name in hard:
            scores = (spread(runs.scores(task, name, arm).values()).text(100) for arm in trained)
            tables["hard"].append([f"{task}, {name}", *scores])
    means = (found.get(f"mean of six tasks{suffix}") for suffix in against.values())
    shown = [f"**{m.verdict}**: {m.difference.text('points')}" if m and m.difference else "" for m in means]
    tables["baselines"].append(["mean of six tasks", *[""] * len(arms), *shown])
    return {name: with_rule(lines) for name, lines in tables.items()}


def with_rule(lines: list[list[str]]) -> str:
    """A Markdown table of lines of which the first is the header."""
    return markdown_table([lines[0], ["---"] * len(lines[0]), *lines[1:]])


def result_folders(folder: Path = ROOT / "results") -> list[Path]:
    """The folders with rows, in the order of FOLDERS; paths relative to the project."""
    found = {path.parent.relative_to(ROOT) for path in folder.glob("*/rows.jsonl")}
    first = {path: next(i for i, name in enumerate(FOLDERS) if path.name.startswith(name)) for path in found}
    return sorted(found, key=lambda path: (first[path], path.name))


def command_line() -> str:
    """The page of the command line: what every ``efla COMMAND --help`` prints."""
    from efla.cli import COMMANDS

    helps = [("",), *((name,) for name in COMMANDS), ("reproduce", "paper"), ("reproduce", "smnist")]
    parts = [
        "# Command line",
        "",
        "Generated by `make readme` from `efla --help` and `efla COMMAND --help`; do not edit.",
    ]
    for words in helps:
        command = " ".join(("efla", *words)).strip()
        parts += ["", f"## `{command}`", "", "```text", _help([*filter(None, words), "--help"]), "```"]
    return "\n".join(parts) + "\n"


def _help(arguments: list[str]) -> str:
    from efla.cli import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(arguments)
    lines = re.sub(r"\x1b\[[\d;]*m", "", text.getvalue()).splitlines()
    return "\n".join(line.rstrip() for line in lines).strip("\n")


def filled(text: str, tables: dict[str, str]) -> str:
    """A page with the text between ``<!-- NAME -->`` and ``<!-- /NAME -->`` replaced."""
    for name, table in tables.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(start)
        if end not in rest:
            raise ValueError(f"the page lacks the markers {start} and {end}")
        text = f"{before}{start}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


def pages(sections: Sequence[Any]) -> dict[Path, str]:
    """The pages with generated tables, and the page of claims, as the rows say."""
    from efla.report.page import claims_page

    readme = filled(README.read_text(), {"speed": speed_tables.speed_table(), "claims": claims_table(sections)})
    speed = filled(
        SPEED.read_text(),
        {
            "goals": speed_tables.goals_table(),
            "peers": speed_tables.peers_table(),
            "products": speed_tables.products_table(),
            "runtimes": speed_tables.runtimes_table(),
            "qwen": speed_tables.qwen_table(),
            "models": speed_tables.models_table(),
            "weights": speed_tables.weights_table(),
        },
    )
    return {
        README: readme,
        SPEED: speed,
        SMNIST: filled(SMNIST.read_text(), smnist_tables()),
        LM: filled(LM.read_text(), lm_tables()),
        MAD: filled(MAD.read_text(), mad_tables()),
        CLAIMS: claims_page(sections),
    }


def main() -> None:
    """Write all of it."""
    os.chdir(ROOT)
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    COMMAND_LINE.write_text(command_line())
    from efla.report.front import by_unit, headline
    from efla.report.page import sections_of
    from efla.runs.chart import Figure
    from efla.runs.vega import save, save_forest

    sections = [section for folder in result_folders() for section in sections_of(folder)]
    for page, text in pages(sections).items():
        page.write_text(text)
    figure = headline(sections)
    assert figure is not None
    for name, charts in (("robustness", figure.charts), ("robustness-narrow", figure.charts[:1])):
        save(Figure(name, figure.title, figure.note, charts), ROOT / "docs/figures", ("svg",))
    save_forest(by_unit(claim_lines(sections)), ROOT / "docs/figures/claims")
    for figure in speed_tables.speed_figures():
        save(figure, ROOT / "docs/figures", ("svg",))


if __name__ == "__main__":
    main()
