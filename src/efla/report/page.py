"""The report: one self-contained HTML page from rows, without network references."""

import colorsys
import datetime
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import efla
from efla.errors import unknown_name
from efla.evaluation import section as evaluation
from efla.experiments import registry
from efla.report import front
from efla.runs.bars import draw
from efla.runs.chart import swatch
from efla.runs.folder import CONFIG, read_config
from efla.runs.rows import ROWS, parse, write_atomically
from efla.runs.sections import Section
from efla.runs.statistics import grouped
from efla.runs.style import ARMS, RULES

_EVALUATION = {"evaluation": evaluation.sections, "evaluation-length": evaluation.length_sections}
"""The folders of ``efla eval``; the registry knows those of ``efla reproduce``."""
_HERE = Path(__file__).parent


def build(runs: Sequence[Path], output: Path) -> list[Section]:
    """Write the report on some run folders to ``output``; returns its sections."""
    try:
        import jinja2
    except ImportError:
        raise RuntimeError("the report needs jinja2: pip install 'efla[experiments]'") from None
    sections = [section for folder in _distinct(runs) for section in sections_of(folder)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.globals |= {"render": draw, "swatch": swatch, "grouped": grouped}
    page = environment.get_template("template.html").render(
        sections=list(enumerate(sections, start=1)),
        front=front.front(sections),
        picture=front.picture(sections),
        not_run=front.not_run(sections),
        unreachable=front.unreachable(),
        verdicts=Counter(claim.verdict for section in sections for claim in section.claims),
        style=(_HERE / "style.css").read_text() + _colours(),
        script=(_HERE / "script.js").read_text(),
        version=efla.__version__,
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, page.encode())
    except OSError as error:
        raise OSError(
            error.errno or 0, f"cannot write the report to {output}: {error.strerror}; choose another --output"
        ) from error
    return sections


def sections_of(folder: Path) -> list[Section]:
    """The sections of one run folder, from its rows."""
    if not (folder / ROWS).is_file() or not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} is not the output folder of `efla reproduce`: it lacks {ROWS} or {CONFIG}")
    rows = parse((folder / ROWS).read_bytes()).rows
    if not rows:
        raise ValueError(f"{folder} holds no finished cell yet; let `efla reproduce` finish at least one")
    experiment = read_config(folder)["experiment"]
    if experiment in _EVALUATION:
        return _EVALUATION[experiment](rows, str(folder))
    if experiment not in registry.names():
        raise unknown_name("experiment", experiment, [*registry.names(), *_EVALUATION])
    return registry.get(experiment).sections(rows, str(folder))


def _distinct(runs: Sequence[Path]) -> list[Path]:
    if not runs:
        raise ValueError("give at least one run folder: efla report runs/smnist-quick")
    return list({folder.resolve(): folder for folder in runs}.values())


def _colours() -> str:
    """The colour of each curve as a CSS variable, lighter on a dark page."""
    lines: dict[str, Any] = {**RULES, **ARMS}
    light = "".join(f"--c-{key}:{line.color};" for key, line in lines.items())
    dark = "".join(f"--c-{key}:{_lighter(line.color)};" for key, line in lines.items())
    return f"\n:root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"


def _lighter(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    parts = colorsys.hls_to_rgb(hue, max(lightness, 0.66), saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)
