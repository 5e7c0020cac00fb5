"""The version is stated once, and distributions hold what they should."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import efla

from .distribution import PAGE, TOP, main, sdist_problems, tracked, wheel_problems

ROOT = Path(__file__).parent.parent


def test_version_is_stated_once_and_agrees_everywhere():
    project = (ROOT / "pyproject.toml").read_text().split("[project]")[1].split("\n[")[0]
    assert not re.search(r"^version", project, flags=re.MULTILINE)
    assert 'dynamic = ["version"]' in project
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert cited is not None and cited[1] == efla.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", efla.__version__)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## (?:\[)?(\d+\.\d+\.\d+)", changelog, flags=re.MULTILINE)
    assert not released or released[0] == efla.__version__


def test_the_lowest_supported_transformers_is_the_one_that_is_tested_and_named():
    floor = re.search(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    tested = re.search(r"^FLOORS := (\S+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert floor is not None and tested is not None and tested[1] == f"{floor[1]}.0"
    assert f"transformers >= {floor[1]}." in (ROOT / "constraints.txt").read_text()
    assert f"transformers {floor[1]} or newer" in (ROOT / "docs/howto/install.md").read_text()


def test_an_sdist_holds_the_sources_and_nothing_else():
    complete = TOP | PAGE | tracked("src", "csrc") | {"PKG-INFO"}
    assert sdist_problems(complete) == []
    assert sdist_problems(complete - {"csrc/CMakeLists.txt"}) == ["lacks csrc/CMakeLists.txt"]
    assert sdist_problems(complete | {"results/README.md"}) == ["holds results/README.md, which does not belong there"]


def test_a_wheel_holds_package_data_kernels_and_licence(tmp_path, capsys):
    package = {name.removeprefix("src/") for name in tracked("src")} | {"efla/explainer/index.html"}
    assert any(not name.endswith(".py") for name in package)
    complete = package | {"efla/native/_kernels.abi3.so", "efla-0.1.0.dist-info/licenses/LICENSE"}
    assert wheel_problems(complete) == []
    assert wheel_problems(complete - {"efla/py.typed"}) == ["lacks efla/py.typed"]
    assert len(wheel_problems(package)) == 2

    archive = tmp_path / "efla-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as wheel:
        for name in complete - {"efla/py.typed"}:
            wheel.writestr(name, "")
    assert main([str(archive)]) == 1
    assert "lacks efla/py.typed" in capsys.readouterr().out
