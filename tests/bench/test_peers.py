"""benchmarks/peers: contenders in processes of their own are checked before they are timed, and rows say what was found."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from efla.bench.scan import Size
from efla.native import missing

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
pytestmark = pytest.mark.skipif(missing() is not None, reason="the kernels are not built")

spec = importlib.util.spec_from_file_location("peers_compare", PEERS / "compare.py")
assert spec is not None and spec.loader is not None
peers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peers)


@pytest.fixture(scope="module")
def native():
    worker = peers.Worker("native", 1)
    yield worker
    worker.close()


@pytest.mark.parametrize(("work", "length"), [("forward", 70), ("training", 70), ("decoding", 1)])
def test_a_contender_is_checked_then_timed(native, work, length, tmp_path):
    (row,) = peers.compare([native], Size(2, length, 2, 16), work, threads=1, rounds=2, folder=tmp_path)
    assert row["contender"] == "native" and row["ratio"] == 1 and row["median"] > 0
    assert 0 < row["error"] < 1e-5


def test_a_wrong_result_is_not_timed(native, monkeypatch, tmp_path, capsys):
    right = peers.oracle
    monkeypatch.setattr(peers, "oracle", lambda *x: {name: 1.01 * y for name, y in right(*x).items()})
    assert peers.compare([native], Size(1, 20, 1, 16), "forward", threads=1, rounds=2, folder=tmp_path) == []
    assert "WRONG: not timed" in capsys.readouterr().out


def test_a_missing_or_nonfinite_result_has_an_infinite_error():
    want = {"o": np.ones(3), "state": np.ones(2)}
    assert peers.error_of(want, want) == 0
    assert peers.error_of({"o": np.ones(3)}, want) == np.inf
    assert peers.error_of({**want, "o": np.full(3, np.nan)}, want) == np.inf
    assert peers.error_of({**want, "o": np.ones((1, 3))}, want) == np.inf


def test_a_peer_that_cannot_run_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)  # where it may be installed
    worker = peers.Worker("vllm", 1)
    worker.close()
    assert "vLLM's CPU kernels" in worker.refused


def test_an_interrupted_run_keeps_the_rows_it_has_and_those_of_other_works(monkeypatch, tmp_path):
    class Worker:
        refused = ""

        def __init__(self, name, threads):
            self.name = name

        def close(self):
            pass

    def compare(workers, size, work, threads, rounds, folder):
        if work == "decoding":
            raise KeyboardInterrupt
        return [{"work": f"{work} {size}", "contender": "native", "threads": threads, "median": 1.0}]

    file = tmp_path / "rows.json"
    kept = {"work": "other", "contender": "native", "threads": 2, "median": 2.0}
    file.write_text(json.dumps({"rows": [kept], "refused": {}}))
    monkeypatch.setattr(peers, "Worker", Worker)
    monkeypatch.setattr(peers, "compare", compare)
    command = ["compare.py", "--work", "forward", "decoding", "--threads", "1", "--output", str(file)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(KeyboardInterrupt):
        peers.main()
    rows = json.loads(file.read_text())["rows"]
    assert kept in rows and len(rows) == 1 + len(peers.WORK["forward"])


def test_every_peer_has_a_driver_and_a_line_in_the_table():
    drivers = {path.stem for path in (PEERS / "drivers").glob("*.py")}
    assert drivers == {"native", *peers.PEERS}
    table = (PEERS / "README.md").read_text()
    assert all(f"| `{name}` |" in table for name in peers.PEERS)
