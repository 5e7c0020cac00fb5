"""The runner: resume, failures, errors that say what to do."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from efla.experiments.experiment import Cell
from efla.experiments.runner import run
from efla.runs.folder import CONFIG, RunFolder, read_config
from efla.runs.records import from_record, to_record
from efla.runs.rows import ROWS, read_rows
from tests.experiments.rows import without_volatile
from tests.fresh import run_fresh
from tests.processes import LAST_RESORT, children, started, wait_until

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from tiny_experiment import Tiny, TinyConfig  # noqa: E402


@pytest.fixture(autouse=True)
def _workers_find_the_tiny_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


def _run(config: TinyConfig, folder: Path, executor: str = "inline", workers: int = 2) -> object:
    return run(Tiny(config), folder, executor=executor, workers=workers, console=Console(quiet=True))


def _stable_rows(folder: Path) -> list[dict[str, object]]:
    return sorted(
        (without_volatile(row) for row in read_rows(folder)), key=lambda row: (row["cell"], row["row"], row.get("i", 9))
    )


def test_rows_say_where_they_come_from(tmp_path: Path) -> None:
    _run(TinyConfig(cells=1), tmp_path)
    row = read_rows(tmp_path)[-1]
    assert row["config"] == {"factor": 3}
    assert row["seed"] == 0
    assert row["threads"] == 1
    assert set(row["versions"]) >= {"efla", "torch", "numpy", "python"}
    assert row["wall_seconds"] >= 0
    assert "commit" in row
    assert "machine" in row


def test_a_second_run_does_only_what_is_missing(tmp_path: Path) -> None:
    _run(TinyConfig(cells=2), tmp_path)
    first = (tmp_path / ROWS).read_bytes()
    summary = _run(TinyConfig(cells=5), tmp_path)
    assert (summary.ran, summary.skipped) == (3, 2)  # type: ignore[attr-defined]
    assert (tmp_path / ROWS).read_bytes().startswith(first)
    again = _run(TinyConfig(cells=5), tmp_path)
    assert again.ran == 0  # type: ignore[attr-defined]


def test_worker_processes_write_the_same_rows_as_one_process_and_one_that_dies_fails_its_own_cell_only(
    tmp_path: Path,
) -> None:
    _run(TinyConfig(), tmp_path / "inline")
    with pytest.raises(RuntimeError, match=r"(?s)1 of 6 cells failed.*killed by signal 9"):
        _run(TinyConfig(dying=1), tmp_path / "workers", executor="process")
    others = [row for row in _stable_rows(tmp_path / "inline") if row["seed"] != 1]
    assert _stable_rows(tmp_path / "workers") == others


def test_a_ray_cluster_writes_the_same_rows_as_one_process(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the optional package ray is not installed")
    _run(TinyConfig(cells=4), tmp_path / "inline")
    _run(TinyConfig(cells=4), tmp_path / "ray", executor="ray", workers=2)
    assert _stable_rows(tmp_path / "ray") == _stable_rows(tmp_path / "inline")


def test_without_the_package_the_ray_executor_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RuntimeError, match="pip install"):
        _run(TinyConfig(), tmp_path, executor="ray")


def test_a_failing_cell_does_not_stop_the_others_and_is_run_again(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)1 of 6 cells failed.*seed=2.*this cell is bad"):
        _run(TinyConfig(bad=2), tmp_path)
    assert len({row["cell"] for row in read_rows(tmp_path)}) == 5
    assert _run(TinyConfig(), tmp_path).ran == 1  # type: ignore[attr-defined]


def test_another_config_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    _run(TinyConfig(), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="factor: 3 there, 4 now"):
        _run(TinyConfig(factor=4), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_command_that_failed_at_once_does_not_hold_its_folder(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, "tiny", {"factor": 4}):
        pass  # no row
    _run(TinyConfig(), tmp_path)
    assert read_config(tmp_path)["protocol"]["factor"] == 3


def test_rows_without_a_config_are_refused(tmp_path: Path) -> None:
    _run(TinyConfig(), tmp_path)
    (tmp_path / CONFIG).unlink()
    with pytest.raises(ValueError, match=r"holds rows but no config\.json"):
        _run(TinyConfig(), tmp_path)


def test_a_damaged_config_file_is_a_clear_error(tmp_path: Path) -> None:
    _run(TinyConfig(), tmp_path)
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        _run(TinyConfig(), tmp_path)


@pytest.mark.parametrize("where", ["a-file/out", "/proc/nowhere/out"])
def test_an_unwritable_output_folder_is_a_clear_error(tmp_path: Path, where: str) -> None:
    (tmp_path / "a-file").write_text("in the way")
    with pytest.raises(OSError, match=r"cannot write to .*out: .*--output"):
        _run(TinyConfig(), tmp_path / where)


def test_a_disk_that_fills_up_stops_the_run_and_keeps_finished_cells(tmp_path: Path) -> None:
    """The limit on a file's size stands in for a small disk: the kernel refuses the write in the same place."""
    code = (
        "import resource, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); from tiny_experiment import *\n"
        "from efla.experiments.runner import run; resource.setrlimit(resource.RLIMIT_FSIZE, (3500, 3500))\n"
        "run(Tiny(TinyConfig(cells=40)), Path(sys.argv[2]), executor='inline')"
    )
    full = run_fresh(code, HERE, tmp_path)
    assert full.returncode != 0
    assert "the disk is full. Make room and run the same command again; finished work is safe" in full.stderr
    data = (tmp_path / ROWS).read_bytes()
    assert data.endswith(b"\n"), "the half-written cell was cut off again"
    done = {row["cell"] for row in read_rows(tmp_path)}
    assert 1 <= len(done) < 40
    assert _run(TinyConfig(cells=len(done) + 1), tmp_path).skipped == len(done)  # type: ignore[attr-defined]


def test_two_runs_may_not_write_to_one_folder(tmp_path: Path) -> None:
    with (
        RunFolder.open(tmp_path, "tiny", {}),
        pytest.raises(RuntimeError, match="another run"),
        RunFolder.open(tmp_path, "tiny", {}),
    ):
        pass


def test_a_config_survives_its_record_and_unknown_fields_do_not() -> None:
    config = TinyConfig(factor=7)
    assert from_record(TinyConfig, to_record(config)) == config
    with pytest.raises(ValueError, match=r"unknown field of TinyConfig 'factr'.*'factor'"):
        from_record(TinyConfig, {"factr": 1})
    assert dataclasses.asdict(config) == to_record(config)


@pytest.mark.parametrize("executor", ["inline", pytest.param("process", marks=pytest.mark.slow)])
def test_twenty_kills_at_random_moments_give_the_rows_of_an_undisturbed_run(tmp_path: Path, executor: str) -> None:
    """One process imports torch, then forks runs that SIGKILL ends; see kill_driver.py."""
    driver = [sys.executable, str(HERE / "kill_driver.py"), str(tmp_path / "killed"), "20", executor]
    killed = subprocess.run(driver, capture_output=True, text=True, timeout=LAST_RESORT, check=False)
    assert killed.returncode == 0, killed.stderr
    assert int(killed.stdout) == 20, "every one of the 20 kills hit a running process"
    assert 0 < len({row["cell"] for row in read_rows(tmp_path / "killed")}) < 120
    for folder in ("killed", "undisturbed"):
        _run(TinyConfig(cells=120), tmp_path / folder, executor=executor, workers=4)
    assert _stable_rows(tmp_path / "killed") == _stable_rows(tmp_path / "undisturbed")


# A shell starts its background jobs with Ctrl-C ignored, and children inherit that: here it must work.
TWO_CELLS_THEN_HANGING = """
import signal; signal.signal(signal.SIGINT, signal.default_int_handler)
import sys; from pathlib import Path; from efla.experiments.runner import run; from tiny_experiment import *
run(Tiny(TinyConfig(cells=40, hanging=2)), Path(sys.argv[1]), workers=2)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill-9"])
def test_a_run_that_ends_early_takes_its_workers_along_and_can_be_continued(
    tmp_path: Path, how: signal.Signals
) -> None:
    def rows() -> int:
        return len({row["cell"] for row in read_rows(tmp_path)}) if (tmp_path / ROWS).exists() else 0

    with started([sys.executable, "-c", TWO_CELLS_THEN_HANGING, str(tmp_path)]) as process:
        wait_until(lambda: rows() == 2, process)
        workers = children(process.pid)
        assert len(workers) == 2
        process.send_signal(how)
        printed, _ = process.communicate()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    if how == signal.SIGINT:
        assert "the same command continues" in printed
        assert (tmp_path / ROWS).read_bytes().endswith(b"\n")
    assert _run(TinyConfig(cells=3), tmp_path).skipped == 2  # type: ignore[attr-defined]


def test_people_read_the_name_of_an_arm_and_rows_keep_its_key() -> None:
    cell = Cell({"arm": "exact-flow", "rate": 0.003, "seed": 1})
    assert (cell.id, cell.label) == ("arm=exact-flow rate=0.003 seed=1", "EFLA rate=0.003 seed=1")
