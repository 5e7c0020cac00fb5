"""The report: one self-contained HTML page from rows, without network references."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import efla
from efla.errors import check_names, import_optional
from efla.evaluation import section as evaluation
from efla.experiments import registry
from efla.report import front
from efla.runs import vega
from efla.runs.chart import values_table
from efla.runs.folder import CONFIG, read_config
from efla.runs.names import LOOKS
from efla.runs.rows import ROWS, read_rows, write_atomically
from efla.runs.sections import Section
from efla.runs.statistics import grouped

_EVALUATION = {"evaluation": evaluation.sections, "evaluation-length": evaluation.length_sections}
"""The folders of ``efla eval``; the registry knows those of ``efla reproduce``."""
_HERE = Path(__file__).parent


def build(runs: Sequence[Path], output: Path) -> list[Section]:
    """Write the report on some run folders to ``output``; returns its sections."""
    if not runs:
        raise ValueError("give at least one run folder: efla report runs/smnist-quick")
    folders = {folder.resolve(): folder for folder in runs}.values()
    sections = [section for folder in folders for section in sections_of(folder)]
    page = _render(
        "template.html",
        sections=list(enumerate(sections, start=1)),
        lines=front.claim_lines(sections),
        specs=[],  # of the charts, in the order in which the template draws them
        vega=vega,
        values_table=values_table,
        dash_of=lambda key: " ".join(map(str, vega.DASHES[LOOKS[key].dash])),
        style=(_HERE / "style.css").read_text() + vega.style_sheet(),
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


def claims_page(sections: Sequence[Section]) -> str:
    """The page of claims for the documentation, in Markdown: every comparison of every claim, then what was not run."""
    return _render("claims.md", sections=sections)


def _render(template: str, **values: Any) -> str:
    """Fill a template of this folder; values in HTML are escaped."""
    jinja2 = import_optional("jinja2", "the report needs jinja2: pip install 'efla[experiments]'")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=template.endswith(".html"), trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return environment.get_template(template).render(front=front, grouped=grouped, **values)


def sections_of(folder: Path) -> list[Section]:
    """The sections of one run folder, from its rows. They call the folder by its name if its path is absolute."""
    if not (folder / ROWS).is_file() or not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} is not the output folder of `efla reproduce`: it lacks {ROWS} or {CONFIG}")
    rows = read_rows(folder)
    if not rows:
        raise ValueError(f"{folder} holds no finished cell yet; let `efla reproduce` finish at least one")
    experiment = read_config(folder)["experiment"]
    source = folder.name if folder.is_absolute() else str(folder)
    if experiment in _EVALUATION:
        return _EVALUATION[experiment](rows, source)
    check_names("experiment", [experiment], [*registry.names(), *_EVALUATION])
    return registry.get(experiment).sections(rows, source)
