"""Checks the contents of built distributions: ``python tests/distribution.py dist/*``, as ``make dist`` does.

An sdist holds exactly the tracked files that build the package; a wheel exactly the tracked files of the package, the page of
``efla explain`` and the compiled kernels. Both are compared with git, so that a new template needs no entry in a list.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOP = {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml"}
PAGE = {"docs/explainer/index.html"}  # of efla explain; in a wheel it is below efla/
KERNELS = re.compile(r"efla/native/_kernels\.[\w.-]+\.(so|pyd)")


def tracked(*folders: str) -> set[str]:
    """The files that git tracks below these folders of the repository."""
    done = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()}


def sdist_problems(names: set[str]) -> list[str]:
    """What is wrong with an sdist of these files, named without the leading folder."""
    return _differences(names - {"PKG-INFO"}, TOP | PAGE | tracked("src", "csrc"))


def wheel_problems(names: set[str]) -> list[str]:
    """What is wrong with a wheel of these files; a wheel built without a compiler is reported too."""
    files = {name for name in names if ".dist-info/" not in name}
    kernels = {name for name in files if KERNELS.fullmatch(name)}
    package = {name.removeprefix("src/") for name in tracked("src")} | {page.replace("docs", "efla") for page in PAGE}
    problems = _differences(files - kernels, package)
    if len(kernels) != 1:
        problems.append(f"holds {len(kernels)} compiled modules efla/native/_kernels, expected 1")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        problems.append("lacks the licence")
    return problems


def problems_of(archive: Path) -> list[str]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel_problems({name for name in wheel.namelist() if not name.endswith("/")})
    with tarfile.open(archive) as sdist:
        return sdist_problems({member.name.split("/", 1)[1] for member in sdist if member.isfile()})


def _differences(names: set[str], expected: set[str]) -> list[str]:
    return [f"lacks {name}" for name in sorted(expected - names)] + [
        f"holds {name}, which does not belong there" for name in sorted(names - expected)
    ]


def main(archives: list[str]) -> int:
    failed = False
    for archive in map(Path, archives):
        problems = problems_of(archive)
        failed |= bool(problems)
        print(f"{archive.name}: {'contents as expected' if not problems else f'{len(problems)} problems'}")
        for problem in problems:
            print(f"  {problem}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
