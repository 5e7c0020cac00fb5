"""Peers compared with ``native``: python benchmarks/peers/compare.py [--peers NAME…] [--work forward…] [--threads 1 2]

Every contender runs in a process of its own, limited to as many processors as it may use threads, with the same settings of
malloc. Each is compared with the float64 oracle first; a peer whose result is wrong is not timed. Then all are timed in turn.
Rows of other works, threads and peers in the output file stay.
"""

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

import efla
from efla import bench
from efla.bench.scan import FORWARD_FLOPS, HEADLINE, SAMPLE_SECONDS, TRAINING_FLOPS, Inputs, Size, inputs
from efla.runs.rows import write_atomically
from efla.runs.timing import Measurement

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-peers"
PEERS = ["ggml", "onnxruntime", "openvino", "mlx", "transformers", "fla", "vllm"]
DECODING = [Size(batch, 1, 8, width) for width in (64, 128) for batch in (1, 16)]
WORK = {"forward": HEADLINE, "training": HEADLINE, "decoding": DECODING}
LABELS = {"forward": "forward", "training": "forward+backward", "decoding": "decode"}
WORST_ERROR = 1e-3
"""Largest difference from float64, relative to the largest value. float32 gives 1e-6 to 1e-5; a wrong formula far more. A driver
that computes in 16 bits sets another."""
# glibc keeps freed memory in the process, as efla.native does for itself.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


class Worker:
    """A contender in its own process; see worker.py. ``refused`` says why it cannot run here."""

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.refused, self.version, self.work, self.worst_error = name, "", "", [], None
        python = ENVIRONMENTS / name / "bin" / "python"
        limits = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "OPENBLAS", "MKL")}
        self.process = subprocess.Popen(
            [python if python.exists() else sys.executable, HERE / "worker.py", name, str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | MALLOC | limits,
        )  # fmt: skip
        os.sched_setaffinity(self.process.pid, sorted(os.sched_getaffinity(0))[:threads])
        self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline() or '{"refused": "its process ended; see its message above"}')
        for name in self.__dict__.keys() & answer.keys():
            setattr(self, name, answer[name])
        return answer

    def ask(self, **command: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        return self._receive()

    def compute(self, file: Path, work: str) -> dict[str, np.ndarray]:
        """What the contender computes from the arrays in ``file``; the call stays loaded."""
        results = file.with_name(f"{self.name}-results.npz")
        self.ask(load=str(file), work=work, results=str(results))
        if self.refused:
            return {}
        with np.load(results) as arrays:
            return dict(arrays)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def arrays_of(size: Size, made: Inputs) -> dict[str, np.ndarray]:
    """The inputs, and a state as decoding carries it."""
    state = np.random.default_rng(1).standard_normal((size.batch, size.heads, size.width, size.width))
    tensors = {name: x.numpy() for name, x in made._asdict().items()}
    return {**tensors, "state": state.astype(np.float32)}


def oracle(arrays: dict[str, np.ndarray], work: str) -> dict[str, np.ndarray]:
    """The same by the reference backend in float64."""
    names = ("q", "k", "v", "beta", "log_gate")
    tensors = [torch.from_numpy(arrays[name]).double().requires_grad_(work == "training") for name in names]
    options: dict[str, Any] = {}
    if work == "decoding":
        options = {"initial_state": torch.from_numpy(arrays["state"]).double(), "output_final_state": True}
    o, state = efla.linear_attention(*tensors, rule="gated_delta", backend="reference", **options)
    found = {"o": o}
    if work == "training":
        gradients = torch.autograd.grad(o, tensors, grad_outputs=torch.ones_like(o))
        found |= {f"d_{name}": x for name, x in zip(names, gradients, strict=True)}
    elif work == "decoding":
        found["state"] = state
    return {name: x.detach().numpy() for name, x in found.items()}


def error_of(have: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """Largest difference relative to the largest value, over all results; infinite for a missing or non-finite one."""
    if have.keys() != want.keys() or any(have[name].shape != want[name].shape for name in want):
        return math.inf
    errors = [float(np.abs(have[name] - want[name]).max() / np.abs(want[name]).max()) for name in want]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def compare(
    workers: list[Worker], size: Size, work: str, threads: int, rounds: int, folder: Path
) -> list[dict[str, object]]:
    """Check all workers on a shorter call of the same widths, then time them in turn on the whole one."""
    # The first tokens of the first sequences: the oracle takes its time.
    short = Size(min(size.batch, 4 if size.length > 1 else 16), min(size.length, 200), size.heads, size.width)
    arrays, file = arrays_of(short, inputs(short, "gated_delta")), folder / "inputs.npz"
    np.savez(file, **arrays)
    want, errors, timed = oracle(arrays, work), {}, []
    for worker in workers:
        if work in worker.work and not worker.refused:
            errors[worker.name] = error_of(worker.compute(file, work), want)
            if is_right := errors[worker.name] < (worker.worst_error or WORST_ERROR):
                timed.append(worker)
            verdict = "" if is_right else " WRONG: not timed"
            print(f"  {worker.name:14} error {errors[worker.name]:.1e}{verdict}", flush=True)
    np.savez(file, **arrays_of(size, inputs(size, "gated_delta")))
    repeats = {}
    for worker in timed:
        worker.compute(file, work)
        repeats[worker.name] = math.ceil(SAMPLE_SECONDS / worker.ask(repeats=1).get("seconds", math.inf)) or 1
    samples: dict[str, list[float]] = {worker.name: [] for worker in timed if not worker.refused}
    for number in range(rounds):
        for worker in reversed(timed) if number % 2 else timed:
            if worker.name in samples:
                samples[worker.name].append(worker.ask(repeats=repeats[worker.name])["seconds"])
    flops = size.flops(TRAINING_FLOPS if work == "training" else FORWARD_FLOPS)
    rows = []
    for worker in timed:
        if (times := samples.get(worker.name)) is None:
            continue
        low, median, high = statistics.quantiles(times, n=4)
        ratio = statistics.median(t / native for t, native in zip(times, samples["native"], strict=True))
        measured = Measurement(f"{LABELS[work]} {size}", worker.name, threads, median, low, high, rounds, flops)
        extra = {"version": worker.version, "error": errors[worker.name], "ratio": ratio}
        rows.append(measured.as_row() | extra)
        print(f"  {worker.name:14} {median * 1e3:10.4f} ms  {ratio:6.2f} x native", flush=True)
    return rows


def save(rows: list[dict[str, Any]], refused: dict[str, str], rounds: int, file: Path) -> None:
    record = {
        "machine": bench.processor_name(),
        "facts": bench.machine_facts(),
        "threads": max((row["threads"] for row in rows), default=0),
        "rounds": rounds,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "refused": refused,
        "rows": rows,
    }
    write_atomically(file, f"{json.dumps(record, indent=1)}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the gated delta rule of other projects with native.")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--work", nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    before = json.loads(options.output.read_text()) if options.output.exists() else {"rows": [], "refused": {}}
    rows = before["rows"]
    refused = {name: reason for name, reason in before["refused"].items() if name not in options.peers}
    for threads in options.threads:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            workers = []
            for name in ("native", *options.peers):
                workers.append(Worker(name, threads))
                stack.callback(workers[-1].close)
            for work in options.work:
                for size in WORK[work]:
                    print(f"{LABELS[work]} {size}, {threads} threads", flush=True)
                    measured = compare(workers, size, work, threads, options.rounds, folder)
                    new = {(row["work"], row["contender"], row["threads"]) for row in measured}
                    kept = [row for row in rows if (row["work"], row["contender"], row["threads"]) not in new]
                    rows = kept + measured
                    refused |= {worker.name: worker.refused for worker in workers if worker.refused}
                    save(rows, refused, options.rounds, options.output)
    for name, reason in refused.items():
        print(f"{name}: not measured: {reason}")


if __name__ == "__main__":
    main()
