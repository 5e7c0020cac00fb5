"""Mutation testing: one small wrong change at a time, and whether a test fails. ``make test-mutants`` runs it.

    python tests/mutants.py rules evaluation --sample 100

The changes are mutmut's (https://mutmut.readthedocs.io): operators, numbers, arguments, conditions, assignments, strings. It
writes every mutant of a function into one module and chooses among them at each call, so that a mutant needs no import of its
own: this process imports torch, runs the tests once to see which of them call which function and how long they take, and
forks a child per mutant that runs those, the quickest first, until one fails. mutmut's own command does not suit here: it does
not sample, and an editable install of scikit-build-core imports the unmutated sources.

Not mutated: docstrings, annotations, prose (strings with a space), ``raise`` and ``assert``, decorated functions, and what is
outside of functions. A seed draws the sample; a mutant stays in it until its function changes.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib.util
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # children are forked: no thread pool may exist before

import libcst
import pytest
from mutmut.mutation import file_mutation
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state

ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "mutants" / "src"
TARGETS = {
    "rules": ["tests/rules", "tests/scans/test_reference.py"],
    "scans": ["tests/scans", "tests/test_ops.py", "tests/layers/test_decode.py"],
    "train/step.py": ["tests/train/test_step.py"],
    "evaluation": ["tests/evaluation"],
}
"""What is mutated, below src/efla, and the tests that run on it."""
LEFT_OUT = "scans/backends/fla"
"""Runs on a GPU or in Triton's interpreter only (make test-gpu-sim)."""
UNSEEN = re.compile(
    r"\b(strict|stacklevel|disable_tqdm|caption_justify)="
    r"(\([^)]*\)|[^,()]*),?|batch_(tokens|size): int = \d+|[\s,]"
)
"""Arguments that check our own invariants, as ``assert`` does, or are the looks of tables and bars; how much is
computed at a time unless told; and spaces and commas."""
CPU, SAME = "the same on a CPU", "the same result"
EXCUSED: dict[tuple[str, str], str] = {
    (
        "efla.scans.backends.chunked.xǁ_ChunkPlanǁgroups",
        "real = torch.nonzero(~is_padding.flatten()).flatten().to(None)",
    ): CPU,
    (
        "efla.scans.backends.chunked.xǁ_ChunkPlanǁgroups",
        "if steps or len(starts) + running > max_chunks:",
    ): "groups of any size do",
    (
        "efla.scans.backends.chunked.xǁ_ChunkPlanǁgroups",
        "while self.lengths[running - 2] <= position:",
    ): SAME,  # a chunk of padding more
    (
        "efla.scans.backends.chunked.x_backward",
        "passed = (chunks.decay_all * d_after * before).sum((-1, +2))",
    ): SAME,  # of four dimensions
    (
        "efla.train.step.x__value",
        "return float(norm.full_tensor() if (isinstance(norm, DTensor)) and False else norm)",
    ): "torch 2.13 has summed the norm over the ranks already, earlier versions had not",
    ("efla.train.step.x_train_step", "total = torch.zeros((), device=None, dtype=torch.float64)"): CPU,
    ("efla.train.step.x_train_step", "total = torch.zeros((), dtype=torch.float64)"): CPU,
    (
        "efla.evaluation.likelihood.xǁ_Scorerǁ_prefill",
        "out = self._run(padded(prefixes, None, length, left=True), keep=1, mask=mask, use_cache=True)",
    ): CPU,
    (
        "efla.evaluation.likelihood.xǁ_Scorerǁ_prefill",
        "out = self._run(padded(prefixes, self.device, length, left=True), keep=1, mask=mask, )",
    ): SAME,  # what is left out is the default
    (
        "efla.evaluation.likelihood.xǁ_Scorerǁ_continuations",
        "for part in _batches([len(rest) - 1 for _, _, rest in rests], budget):",
    ): SAME,  # batches of any size do
    ("efla.evaluation.run.xǁEvaluationǁevaluate", "device=settings.device,"): CPU,
    (
        "efla.evaluation.tasks.x_definition",
        "return dict(load_yaml(Path(lm_eval.tasks.__file__).parent / SOURCES[name].definition, ))",
    ): SAME,  # what is left out is the default
    (
        "efla.evaluation.perplexity.x__window",
        "return max(1, int(MAX_LOGITS / int(model.config.get_text_config().vocab_size)))",
    ): SAME,
    ("efla.evaluation.perplexity.x_bits_by_position", "if low <= high:"): SAME,  # the sum over nothing is zero
    (
        "efla.evaluation.perplexity.x_why_not_carried",
        "tokens = [1 + 7 * i % (int(model.config.get_text_config().vocab_size) - 1) for i in range(34)]",
    ): "any tokens do",
    ("efla.models.loading.x__digest", "while piece := stream.read(1 << 22):"): "pieces of any size do",
    (
        "efla.evaluation.likelihood.x__batches",
        "cost, start = [1], [0]  # of the best cut of the first i lengths: its cost, and the start of its last slice",
    ): SAME,  # every cut costs one more
    (
        "efla.evaluation.tasks.x__wikitext",
        'stripped = line.replace("= = =", "===").replace("= =", "XX==XX").strip()',
    ): SAME,  # a heading of a section still does not look like one of a page
    (
        "efla.evaluation.run.xǁTaskEvaluationǁrun",
        "task = load_task(name, settings.data, )",
    ): SAME,  # the records are cut again
    ("efla.evaluation.long_context.xǁLengthEvaluationǁ_positions", "batch_rows=max(1, batch_tokens // 1024),"): SAME,
    ("efla.evaluation.long_context.xǁLengthEvaluationǁ_positions", "window=min(1024, batch_tokens),"): SAME,
    (
        "efla.evaluation.section.x_length_sections",
        'steps = max((int(row["steps"]) for row in probes), default=None)',
    ): SAME,  # nothing to an ``if``
    (
        "efla.evaluation.long_context.xǁLengthEvaluationǁrun",
        'return [*rows, {"trained_length": int(getattr(loaded.model.config, "max_position_embeddings", None) or 0)}]',
    ): SAME,
    (
        "efla.evaluation.long_context.x_load_text",
        'return given, test.decode(errors="ignore").strip()',
    ): SAME,
    (
        "efla.evaluation.items.x__line",
        'verdict = "B better" if (d.value <= 0) == column.lower_is_better else "A better"',
    ): SAME,  # a clear difference is not zero
    (
        "efla.evaluation.harness.x_run_task",
        "results = evaluate(model, tasks, limit=limit, log_samples=True)",
    ): SAME,  # but slower: the standard errors are our own
}
"""(function, line before or after the change) -> why no test in this process can fail. Such mutants are not counted."""


@dataclass
class Mutant:
    """``name`` as mutmut has it, the function it is in, and the lines that differ."""

    name: str
    function: str
    diff: str
    result: str = "not run"

    def lot(self, seed: int) -> bytes:
        """What decides whether it is in the sample, whatever else is changed in the sources."""
        return hashlib.sha256(f"{seed} {self.function} {self.diff}".encode()).digest()

    @property
    def reason(self) -> str | None:
        lines = [line[1:].strip() for line in self.diff.splitlines()]
        return next((EXCUSED[self.function, line] for line in lines if (self.function, line) in EXCUSED), None)


@dataclass(eq=False)
class Coverage:
    """Pytest plugin: the tests that passed, their seconds, and which call which function."""

    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    tests_of: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    of_fixture: dict[object, set[str]] = field(default_factory=lambda: defaultdict(set))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.seconds[report.nodeid] = report.duration

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: object) -> Generator[None, object, object]:
        """A fixture of a module is made in its first test, but all that use it run what it runs."""
        before, state()._stats = state()._stats, set()
        try:
            return (yield)
        finally:
            self.of_fixture[fixturedef] |= state()._stats
            state()._stats |= before

    def pytest_runtest_teardown(self, item: pytest.Function) -> None:
        fixtures = [fixture for found in item._fixtureinfo.name2fixturedefs.values() for fixture in found]
        for function in state()._stats.union(*(self.of_fixture[fixture] for fixture in fixtures)):
            self.tests_of[function].add(item.nodeid)
        state()._stats.clear()

    def tests(self, function: str, limit: float) -> list[str]:
        """The tests of a function, quickest first, as many as take ``limit`` seconds."""
        chosen, total = [], 0.0
        passed = self.tests_of[function] & self.seconds.keys() - set(self.failed)
        for test in sorted(passed, key=lambda test: self.seconds[test]):
            total += self.seconds[test]
            if chosen and total > limit:
                break
            chosen.append(test)
        return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}, or a file below them; default: all")
    parser.add_argument("--sample", type=int, default=150, help="mutants of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of tests for each mutant")
    parser.add_argument("--limit", type=float, default=5.0, help="survivors in percent at which the command fails")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    status = 0
    for target in options.targets or TARGETS:
        # A process for each target: what the tests of one leave behind does not slow the next.
        if (pid := os.fork()) == 0:
            os._exit(run(target, options))
        status |= os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status


def run(target: str, options: argparse.Namespace) -> int:
    start = time.monotonic()
    tests = next((tests for name, tests in TARGETS.items() if f"{target}/".startswith(f"{name}/")), None)
    if tests is None or not (ROOT / "src/efla" / target).exists():
        print(f"nothing is known of {target!r}; give one of {', '.join(TARGETS)} or a file below them", file=sys.stderr)
        return 2
    mutants = list(write_mutants(target))
    sys.modules["vl_convert"] = None  # type: ignore[assignment]  # its threads are gone after a fork, and drawing would hang
    import_from_copy()
    set_mutant_under_test("stats")
    coverage = Coverage()
    arguments = [
        "-q",
        "--tb=line",
        "--no-header",
        "--show-capture=no",
        "-m",
        "not slow and not browser and not gpu_sim",
    ]
    if (status := pytest.main([*arguments, *tests], plugins=[coverage])) not in (0, 1):
        return int(status)
    print(f"\n{target}: {len(mutants)} mutants, {len(coverage.seconds)} tests in {time.monotonic() - start:.0f} s")
    for test in coverage.failed:
        print(f"  left out, it fails where mutants can be chosen (as torch.compile does): {test}")
    chosen = sorted(mutants, key=lambda mutant: mutant.lot(options.seed))[: options.sample]
    wait: dict[int, tuple[Mutant, float]] = {}
    for mutant in chosen:
        covering = coverage.tests(mutant.function, options.seconds)
        if not covering:
            mutant.result = "no tests"
            continue
        while len(wait) >= options.jobs:
            reap(wait)
        # Reports of a failing test take longer than the test: a minute, and ten times what the tests took.
        deadline = time.monotonic() + 60 + 10 * sum(coverage.seconds[test] for test in covering)
        wait[fork(mutant, covering)] = (mutant, deadline)
    while wait:
        reap(wait)
    print()
    return report(target, chosen, options.limit, time.monotonic() - start)


def write_mutants(target: str) -> Iterator[Mutant]:
    """Copy the package, with every mutant of the target's functions in it, and list them."""
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(ROOT / "src", COPY, ignore=shutil.ignore_patterns("__pycache__"))
    file_mutation.MutationVisitor = Visitor
    path = COPY / "efla" / target
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        if file.is_relative_to(COPY / "efla" / LEFT_OUT):
            continue
        module = ".".join(file.relative_to(COPY).with_suffix("").parts).removesuffix(".__init__")
        mutated = file_mutation.mutate_file_contents(str(file), file.read_text())
        lines = mutated.code.splitlines()
        file.write_text(mutated.code)
        text = {n: lines[s.start - 1 : s.end] for n, s in mutated.line_span_by_function_name.items()}
        for name in mutated.mutant_names:
            base = name.rpartition("__mutmut_")[0]
            versions = [[line for line in text[n] if n not in line] for n in (f"{base}__mutmut_orig", name)]
            changed = [
                line for line in difflib.unified_diff(*versions, n=0, lineterm="") if line[:3] not in ("---", "+++")
            ]
            diff = "\n".join(line for line in changed if not line.startswith("@@"))
            old, new = ("".join(line[1:] for line in changed if line[0] == sign) for sign in "-+")
            old, new = (UNSEEN.sub("", text).replace("None", "False") for text in (old, new))  # the same to an ``if``
            if old == new:
                continue
            yield Mutant(f"{module}.{name}", f"{module}.{base}", diff)


class Visitor(file_mutation.MutationVisitor):  # type: ignore[misc]
    """mutmut's, without errors, our own invariants and prose."""

    def _skip_node_and_children(self, node: libcst.CSTNode) -> bool:
        if isinstance(node, libcst.Raise | libcst.Assert):
            return True
        if isinstance(node, libcst.SimpleString) and " " in node.value:
            return True
        return bool(super()._skip_node_and_children(node))


def import_from_copy() -> None:
    """Let ``import efla`` find the copy; the extension stays where it is installed."""
    assert "efla" not in sys.modules
    found = importlib.util.find_spec("efla")
    assert found is not None and found.origin is not None
    source, copy = str(Path(found.origin).parents[1]), str(COPY)
    sys.path[:] = [copy, *(entry for entry in sys.path if entry != source)]
    for finder in sys.meta_path:  # of an editable install by scikit-build-core
        for attribute in ("known_source_files", "submodule_search_locations"):
            known = getattr(finder, attribute, {})
            for name, where in known.items():
                known[name] = (
                    [p.replace(source, copy) for p in where] if isinstance(where, list) else where.replace(source, copy)
                )


def fork(mutant: Mutant, tests: list[str]) -> int:
    """A child that runs the tests on the mutant; its exit code is pytest's."""
    sys.stdout.flush()
    if (pid := os.fork()) != 0:
        return pid
    os.setpgid(0, 0)
    set_mutant_under_test(mutant.name)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1), os.dup2(silence, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = 1
    try:
        code = int(pytest.main(["-x", "-q", "--tb=no", "--no-header", *tests]))
    finally:
        os._exit(code)


def reap(wait: dict[int, tuple[Mutant, float]]) -> None:
    """Wait until a child ends, or is ended because its time is over."""
    while True:
        for pid, (mutant, deadline) in list(wait.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                mutant.result = "survived" if status == 0 else "killed"
            elif time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                mutant.result = "timeout"
            else:
                continue
            del wait[pid]
            marks = {"survived": f"\nS {mutant.name}\n", "killed": ".", "timeout": "T"}
            print(marks[mutant.result], end="", flush=True)
            return
        time.sleep(0.02)


def report(target: str, mutants: list[Mutant], limit: float, seconds: float) -> int:
    """Print the survivors; 1 if there are too many of them."""
    survivors = [mutant for mutant in mutants if mutant.result in ("survived", "no tests")]
    excused = [mutant for mutant in survivors if mutant.reason]
    alive = [mutant for mutant in survivors if not mutant.reason]
    for mutant in sorted(alive, key=lambda mutant: mutant.name):
        print(f"\n{mutant.name}: {mutant.result}\n{mutant.diff}")
    for mutant in excused:
        print(f"\n{mutant.name}: excused, {mutant.reason}\n{mutant.diff}")
    counted = len(mutants) - len(excused)
    share = 100 * len(alive) / max(1, counted)
    timeouts = sum(mutant.result == "timeout" for mutant in mutants)
    print(
        f"\n{target}: {len(alive)} of {counted} mutants survived ({share:.1f} %), {len(excused)} excused, "
        f"{timeouts} ended by time, {seconds / 60:.1f} min"
    )
    return int(share >= limit)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
