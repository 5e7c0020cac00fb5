"""What ``import efla`` costs, seen from a fresh process, and the order of the layers that imports keep."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fresh import run_fresh

ROOT = Path(__file__).parents[1]
OPTIONAL = ("transformers", "matplotlib", "mlxtend", "jinja2", "datasets", "lm_eval", "triton", "fla", "tyro", "rich")
# interruption listens for signals before torch is imported; it imports nothing of efla.
REACHED = {"errors", "interruption", "models", "native", "ops", "phi", "rules", "scans"}
# An editable install finds the package before sys.path does; without its finder the copy is found.
LINT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
from importlinter.cli import lint_imports_command
lint_imports_command()
"""
UPWARD = {
    "models/presets.py": ("import efla.train.config\n", "efla.models is not allowed to import efla.train"),
    "train/config.py": ("from efla.evaluation import run\n", "efla.train is not allowed to import efla.evaluation"),
    "runs/rows.py": ("def later():\n    from efla import cli\n", "efla.runs is not allowed to import efla.cli"),
    "experiments/runner.py": ("import efla.report.page\n", "efla.experiments is not allowed to import efla.report"),
}


def test_import_brings_in_no_optional_package_nor_transformers():
    code = f"import sys, efla; print([name for name in {OPTIONAL!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_import_reaches_no_layer_above_models():
    code = "import sys, efla; print(*{name.split('.')[1] for name in sys.modules if name.startswith('efla.')})"
    done = run_fresh(code)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= REACHED


@pytest.fixture
def lint_imports(tmp_path):
    """Runs the contracts of pyproject.toml on a copy of the sources, to which it adds an import per file."""
    pytest.importorskip("importlinter", reason="import-linter is not installed: pip install 'efla[dev]'")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src/efla", tmp_path / "efla", ignore=shutil.ignore_patterns("*.so", "__pycache__"))

    def run(added: dict[str, str]) -> subprocess.CompletedProcess[str]:
        for name, line in added.items():
            with open(tmp_path / "efla" / name, "a", encoding="utf-8") as file:
                file.write(line)
        command = [sys.executable, "-c", LINT, "--no-cache"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_imports_go_down_the_layers(lint_imports):
    done = lint_imports({})
    assert done.returncode == 0, done.stdout


def test_an_upward_import_breaks_the_contract(lint_imports):
    done = lint_imports({name: line for name, (line, _) in UPWARD.items()})
    assert done.returncode == 1
    for _, message in UPWARD.values():
        assert message in done.stdout


def test_the_public_names_are_there():
    import efla

    for name in ("linear_attention", "scan", "rules", "backends", "ops"):
        assert hasattr(efla, name)
    assert efla.backends()["reference"] is None
    assert efla.backends()["chunked"] is None
