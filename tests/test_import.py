"""What ``import efla`` costs, seen from a fresh process, and the order of the layers that imports keep."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "altair",
    "mlxtend",
    "jinja2",
    "datasets",
    "lm_eval",
    "triton",
    "tyro",
    "rich",
)
LOADED = f"import sys; print([name for name in {HEAVY!r} if name in sys.modules])"
# Both use the standard library only: interruption listens for signals, models waits for torch and transformers.
REACHED = {"interruption", "models"}
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


def run_python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_neither_torch_nor_any_other_package():
    assert run_python("-c", f"import efla; {LOADED}") == "[]\n"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_first_words_of_the_command_line_need_no_torch(option):
    shown = run_python("-c", f"from efla.cli import main; assert main([{option!r}]) == 0; {LOADED}")
    assert shown.splitlines()[-1] == "[]"


def test_the_help_of_no_command_needs_torch():
    code = """
import contextlib, sys
from efla.cli import main
from efla.cli.help import COMMANDS
for words in (*COMMANDS, "reproduce smnist", "reproduce lm", "reproduce paper", "train --recipe efla-340m-paper"):
    with contextlib.suppress(SystemExit):
        main([*words.split(), "--help"])
    assert "torch" not in sys.modules, words
"""
    assert "efla generate" in run_python("-c", code)


def test_import_reaches_no_layer_above_models():
    code = "import sys, efla; print(*{name.split('.')[1] for name in sys.modules if name.startswith('efla.')})"
    assert set(run_python("-c", code).split()) <= REACHED


def test_dir_lists_the_public_names_only_and_each_of_them_exists():
    import efla

    assert dir(efla) == sorted([*efla.__all__, "__version__"])
    assert all(hasattr(efla, name) for name in dir(efla))
    with pytest.raises(AttributeError, match="module 'efla' has no attribute 'scams'"):
        _ = efla.scams


@pytest.mark.parametrize("code", ["import efla, torch", "import torch, efla", "import efla; efla.phi1; import torch"])
def test_the_operators_are_registered_once_torch_and_efla_are_imported(code):
    """A saved program that calls them loads in either order of imports."""
    assert run_python("-c", f"{code}; print(torch.ops.efla.scan)").strip() == "efla.scan"


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
