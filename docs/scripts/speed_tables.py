"""The tables and figures that benchmarks/results makes: kernels against other projects, goals, models, weights."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]

KERNELS = {
    "forward B1 T4096 H8 D64": "forward, 4,096 tokens, 8 heads of 64",
    "forward B1 T4096 H8 D128": "forward, 4,096 tokens, 8 heads of 128",
    "forward+backward B1 T4096 H8 D64": "with backward, 8 heads of 64",
    "forward+backward B1 T4096 H8 D128": "with backward, 8 heads of 128",
    "decode B1 T1 H8 D64": "decode a token, batch 1, 8 heads of 64",
    "decode B1 T1 H8 D128": "decode a token, batch 1, 8 heads of 128",
    "decode B16 T1 H8 D128": "decode a token, batch 16, 8 heads of 128",
}
MODELS = {
    "prefill B1 T2048, 4 layers of 512": "4-layer model reads 2,048 tokens",
    "training step B1 T2048, 4 layers of 512": "4-layer model, training step",
    "training step, 8 rows of 512 bytes": "byte model of 1.9M, training step",
    "prefill 2048, Qwen3.5 24 layers of 1024, float32": "Qwen3.5, 24 layers, `accelerate_cpu`: read 2,048 tokens",
    "training step 2048, Qwen3.5 4 layers of 512, float32": "Qwen3.5, 4 layers, `accelerate_cpu`: training step",
    "training step 2048, Qwen3.5 24 layers of 1024, bfloat16": "Qwen3.5, 24 layers in bfloat16, `accelerate_cpu`: training step",
}
"""Work in the rows (up to a bracket) -> its name in the tables, which list others across (kernels) or in cells (models)."""
OURS = ("native", "efla", "chunked", "reference", "gated delta", "sgemm", "one pass", "its products")
"""How the names of contenders begin that are not peers."""
ACCELERATED = "the same, accelerate_cpu"
NAMES = {
    "softmax attention": "softmax (SDPA)",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "mlx": "MLX",
    "vllm": "vLLM (bfloat16)",
    ACCELERATED: "Qwen3.5 with `accelerate_cpu`",
    "transformers Qwen3.5 (gated delta)": "transformers Qwen3.5",
    "transformers Llama (softmax)": "transformers Llama",
}
SETS = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON", "baseline": "portable"}
B1, B1_WIDE, B128 = "B1 T4096 H8 D64", "B1 T4096 H8 D128", "B128 T784 H1 D64"
TRAINED = "forward+backward"
GOALS: list[tuple[str, str, str, str, list[str], str | dict[str, str]]] = [
    ("forward", "transformers' chunk function", "native", "transformers", [f"forward {B1}", f"forward {B128}"], "≥ 9x"),
    ("forward, D128", "the same", "native", "transformers", [f"forward {B1_WIDE}"], "≥ 7x"),
    ("with backward", "the same with autograd", "native", "transformers", [f"{TRAINED} {B1}", f"{TRAINED} {B128}"],
     "≥ 12x; ≥ 5x"),
    ("with backward, D128", "the same", "native", "transformers", [f"{TRAINED} {B1_WIDE}"], "≥ 6x"),
    ("decode, D64, batch 1; 16", "transformers' recurrent function", "native", "transformers",
     ["decode B1 T1 H8 D64", "decode B16 T1 H8 D64"], "≥ 12x"),
    ("decode, D128, batch 1; 16", "the same", "native", "transformers", ["decode B1 T1 H8 D128", "decode B16 T1 H8 D128"],
     "≥ 12x"),
    ("forward", "sgemm", "native", "sgemm", [f"forward {B1}", f"forward {B128}"],
     {"avx512": "≥ 0.75", "avx2": "≥ 0.75; ≥ 0.74"}),
    ("forward, D128", "sgemm", "native", "sgemm", [f"forward {B1_WIDE}"], {"avx512": "≥ 0.75", "avx2": "≥ 0.80"}),
    ("with backward", "sgemm", "native", "sgemm", [f"{TRAINED} {B1}", f"{TRAINED} {B128}"],
     {"avx512": "≥ 0.62", "avx2": "≥ 0.66"}),
    ("with backward, D128", "sgemm", "native", "sgemm", [f"{TRAINED} {B1_WIDE}"], {"avx512": "≥ 0.70", "avx2": "≥ 0.74"}),
    ("decode, D64, batch 1; 4", "one pass over the state", "native", "one pass over the state",
     [f"decode B{batch} T1 H8 D64" for batch in (1, 4)], "≤ 1.8"),
    ("decode, D64, batch 16; 64", "the same", "native", "one pass over the state",
     [f"decode B{batch} T1 H8 D64" for batch in (16, 64)], "≤ 1.6"),
    ("decode, D128, batch 1; 4; 16; 64", "the same", "native", "one pass over the state",
     [f"decode B{batch} T1 H8 D128" for batch in (1, 4, 16, 64)], "≤ 1.8; ≤ 1.8; ≤ 1.8; ≤ 1.3"),
    ("EFLA, D64; D128", "DeltaNet's time", "efla", "delta", [f"rules, forward {size}" for size in (B1, B1_WIDE)], "≤ 1.05"),
    ("EFLA with backward, D64; D128", "DeltaNet's time", "efla", "delta",
     [f"rules, {TRAINED} {size}" for size in (B1, B1_WIDE)], "≤ 1.05"),
    ("a token at T 65,536, D64; D128", "at T 4,096", "native", "native at T4096",
     [f"length, forward B1 T65536 H8 D{width}" for width in (64, 128)], "≤ 1.1"),
    ("a token at T 262,144, D64; D128", "at T 4,096", "native", "native at T4096",
     [f"length, forward B1 T262144 H8 D{width}" for width in (64, 128)], "≤ 1.1"),
    ("forward at T 16,384, D64; D128", "causal softmax attention (SDPA)", "native", "softmax attention",
     [f"length, forward B1 T16384 H8 D{width}" for width in (64, 128)], "≥ 40x; ≥ 25x"),
    ("bfloat16 inputs, D64; D128", "float32's time", "native bfloat16", "native", [f"forward {B1}", f"forward {B1_WIDE}"],
     "≤ 1"),
    ("one head of 128, forward, T 64; 512", "one thread", "native", "native, 1 thread",
     [f"short, forward B1 T{tokens} H1 D128" for tokens in (64, 512)], "≥ 1.8x"),
    ("the same with backward", "one thread", "native", "native, 1 thread",
     [f"short, {TRAINED} B1 T{tokens} H1 D128" for tokens in (64, 512)], "≥ 1.8x"),
]  # fmt: skip
"""(title, against what, our contender, theirs, works, goals): ≥ for how many times as fast, ≤ for the share of their time, each
for the same number of flops. A goal for all works or one for each; by instruction set where they differ."""


def speed_table(folder: Path = ROOT / "benchmarks/results") -> str:
    """Our median, and how many times as long others take: a table of kernels by peer, and one of models by instruction set.

    A ratio comes from one file, so from one run. Where files overlap, more threads and then the newest win.
    """
    files = [json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))]
    records = [record for file in files for record in (file if isinstance(file, list) else [file])]
    records = [record for record in records if "SIMD (native)" in record.get("facts", {})]
    groups = [group for record in sorted(records, key=lambda r: r["date"]) for group in _groups(record)]
    groups.sort(key=lambda group: group.threads)
    cells: dict[str, dict[str, Group]] = {}  # simd -> work -> what is shown
    for group in groups:
        peers = {name: ratio for name, ratio in group.ratios.items() if not name.startswith(OURS)}
        if group.work not in (KERNELS | MODELS) or not peers:
            continue
        column = cells.setdefault(group.simd, {})
        before = column.get(group.work)
        kept = before.ratios if before is not None and before.threads == group.threads else {}
        column[group.work] = group._replace(ratios={**kept, **peers})
    sets = [simd for simd in SETS if simd in cells]
    usual = {simd: statistics.mode(group.threads for group in cells[simd].values()) for simd in sets}
    machines = (
        f"{SETS[simd]}: {' and '.join(sorted({group.machine for group in cells[simd].values()}))}, {_threads(usual[simd])}"
        for simd in sets
    )
    peers = [row for record in _records(folder, "peers-*.json") for row in record["rows"]]
    errors = f" {_errors(peers)}." if peers else ""
    varied = any(group.threads != usual[simd] for simd in sets for group in cells[simd].values())
    notes = f"{'; '.join(machines)}{', unless a cell says otherwise' if varied else ''}.{errors}"
    columns = [(cells[simd], usual[simd]) for simd in sets]
    bracket = f" ({'; '.join(SETS[simd] for simd in sets[1:])})" if len(sets) > 1 else ""
    tables = [_kernel_table(columns, f"{SETS[sets[0]]}{bracket}"), _model_table(columns, [SETS[simd] for simd in sets])]
    return "\n\n".join([*filter(None, tables), notes])


Columns = Sequence[tuple[dict[str, "Group"], int]]
"""For each instruction set: the work -> what is shown, and the usual number of threads."""


def _kernel_table(columns: Columns, title: str) -> str:
    """A column per peer, the closest first; other instruction sets than the first are in brackets."""
    found = [column[work] for column, _ in columns for work in KERNELS if work in column]
    closest = {
        name: min(group.ratios.get(name, float("inf")) for group in found) for each in found for name in each.ratios
    }
    names = sorted(closest, key=lambda name: closest[name])
    lines = [[title, "efla", *(NAMES.get(name, name) for name in names)], ["---", *["---:"] * (len(names) + 1)]]
    for work, name in KERNELS.items():
        groups = [(column.get(work), usual) for column, usual in columns]
        if any(group for group, _ in groups):
            ours = [_own_time(group, usual) if group else "" for group, usual in groups]
            theirs = [
                [_times(group.ratios[peer]) if group and peer in group.ratios else "" for group, _ in groups]
                for peer in names
            ]
            lines.append([name, *map(_first_and_others, [ours, *theirs])])
    return markdown_table(lines) if found else ""


def _first_and_others(values: Sequence[str]) -> str:
    """The first value and, in brackets, the others that there are."""
    others = "; ".join(filter(None, values[1:]))
    return " ".join(filter(None, [values[0], f"({others})" * bool(others)]))


def _model_table(columns: Columns, titles: Sequence[str]) -> str:
    """A column per instruction set; the others are named in the cells."""
    lines = [["model", *titles], ["---"] * (len(titles) + 1)]
    for work, name in MODELS.items():
        cells = (_speed(column[work], usual) if work in column else "" for column, usual in columns)
        if any(work in column for column, _ in columns):
            lines.append([name, *cells])
    return markdown_table(lines) if len(lines) > 2 else ""


def goals_table(folder: Path = ROOT / "benchmarks/results") -> str:
    """What was aimed at and what each of ``scan-*.json`` measured; a missed goal is bold."""
    records = _records(folder, "scan-*.json")
    if not records:
        return "Not measured yet."
    simds = [record["facts"]["SIMD (native)"].split()[0] for record in records]
    machines = [f"{record['machine']}, {record['date'][:10]}" for record in records]
    lines = [["work", "against", "goal", *machines], ["---"] * (3 + len(records))]
    found = [{(row["work"], row["contender"]): row for row in record["rows"]} for record in records]
    for title, against, ours, theirs, works, goals in GOALS:
        cells = []
        for simd, rows in zip(simds, found, strict=True):
            goal = goals if isinstance(goals, str) else goals.get(simd, "")
            each = goal.split("; ") if "; " in goal else [goal] * len(works)
            pairs = [(rows.get((work, ours)), rows.get((work, theirs))) for work in works]
            cells.append("; ".join(_judged(*pair, g) for pair, g in zip(pairs, each, strict=True) if all(pair)))
        shown = goals if isinstance(goals, str) else "; ".join(f"{goals[s]} ({SETS[s]})" for s in SETS if s in goals)
        lines.append([title, against, re.sub(r"(?<=\d)x", "\N{MULTIPLICATION SIGN}", shown), *cells])
    return markdown_table(lines)


def _judged(ours: Any, theirs: Any, goal: str) -> str:
    """How many times as fast as theirs (≥) or what share of their time (≤) ours is, for the same flops; bold if it misses."""
    faster = theirs["median"] / theirs["useful_flops"] / (ours["median"] / ours["useful_flops"])
    value = faster if goal.startswith("≥") else 1 / faster
    sign, _, bound = goal.partition(" ")
    unit = "\N{MULTIPLICATION SIGN}" * bound.endswith("x")
    text = f"{value:.1f}{unit}" if unit and value >= 10 else f"{value:.2f}{unit}"
    limit = float(bound.rstrip("x"))
    met = round(value, 2) >= limit if sign == "≥" else round(value, 2) <= limit
    return text if met else f"**{text}**"


def products_table(folder: Path = ROOT / "benchmarks/results") -> str:
    """Models beside their own matrix products and ONNX Runtime, a table for each machine of ``products-*.json``."""
    tables: dict[str, list[list[str]]] = {}  # by machine and date
    for record in _records(folder, "products-*.json"):
        head = [["work", "threads", "model", "its products", "model / products", "ONNX Runtime / model"], ["---"] * 6]
        lines = tables.setdefault(f"{record['machine']}, {record['date'][:10]}", head)
        works: dict[tuple[str, int], dict[str, float]] = {}
        for row in record["rows"]:
            works.setdefault((row["work"], row["threads"]), {})[row["contender"]] = row["median"]
        for (work, threads), seconds in works.items():
            model, floor, onnx = (seconds.get(name) for name in ("model", "its products", "ONNX Runtime"))
            if model is None or floor is None:
                continue
            ratio = "" if onnx is None else f"{onnx / model:.2f}"
            lines.append([work, str(threads), _time(model), _time(floor), f"{model / floor:.2f}", ratio])
    return (
        "\n\n".join(f"{markdown_table(lines)}\n\n{machine}." for machine, lines in tables.items())
        or "Not measured yet."
    )


def models_table(folder: Path = ROOT / "benchmarks/results") -> str:
    """Whole models of ``models.json`` by contender, and what a decoded token costs after many others."""
    if not (folder / "models.json").exists():
        return "Not measured yet."
    record = json.loads((folder / "models.json").read_text())
    works: dict[str, dict[str, float]] = {}
    for row in record["rows"]:
        works.setdefault(row["work"].partition(" (")[0], {})[row["contender"]] = row["median"]
    shown = {MODELS[work]: times for work, times in works.items() if work in MODELS}
    names = list(next(iter(shown.values())))
    lines = [["work", *(NAMES.get(name, name) for name in names)], ["---"] * (len(names) + 1)]
    lines += [[work, *(_time(times[name]) for name in names)] for work, times in shown.items()]
    ratios = [f"{late / early:.2f} times what it costs after 1,000 ({work.split(', ')[1]})"
              for work, (early, late) in ((w, t.values()) for w, t in works.items() if w.startswith("decode"))]  # fmt: skip
    machine = f"{record['machine']}, {_threads(record['threads'])}, {record['date'][:10]}"
    return f"{markdown_table(lines)}\n\nA token after 100,000 others costs {' and '.join(ratios)}. {machine}."


def weights_table(folder: Path = ROOT / "benchmarks/results") -> str:
    """A decoded token with smaller weights, and how many times as fast it is as with float32 weights, from ``weights-*.json``."""
    parts = []
    for runs in _records(folder, "weights-*.json"):
        lines = [["model", "batch", "threads", "float32", "float16", "int8", "its float32 products"], ["---"] * 7]
        works: dict[tuple[str, int], dict[str, float]] = {}
        for row in (row for run in runs for row in run["rows"]):
            works.setdefault((row["work"], row["threads"]), {})[row["contender"]] = row["median"]
        for (work, threads), times in works.items():
            batch, model = re.findall(r"batch (\d+), (.*)", work)[0]
            whole = times["model"]
            smaller = (f"{_time(t)} ({_times(whole / t)})" for t in (times["float16 weights"], times["int8 weights"]))
            lines.append([model, batch, str(threads), _time(whole), *smaller, _time(times["its products"])])
        parts.append(f"{markdown_table(lines)}\n\n{runs[0]['machine']}, {runs[0]['date'][:10]}.")
    return "\n\n".join(parts) or "Not measured yet."


def qwen_table(folder: Path = ROOT / "benchmarks/results") -> str:
    """Qwen3.5 without and with our kernels and its own matrix products, a table for each machine of ``qwen-*.json``."""
    parts = []
    for path in sorted(folder.glob("qwen-*.json")):
        runs = json.loads(path.read_text())
        lines = [["work", "threads", "transformers", "`accelerate_cpu`", "faster", "products' share"], ["---"] * 6]
        works: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
        for row in (row for run in runs for row in run["rows"]):
            works.setdefault((row["work"].replace(" Qwen3.5", ""), row["threads"]), {})[row["contender"]] = row
        for (work, threads), rows in works.items():
            plain, ours, floor = (rows[name] for name in ("transformers Qwen3.5", ACCELERATED, "its products"))
            seconds = [row["median"] / (row["items"] if work.startswith("decode") else 1) for row in (plain, ours)]
            ratio, share = plain["median"] / ours["median"], floor["median"] / ours["median"]
            times = f"{ratio:.2f}\N{MULTIPLICATION SIGN}"
            lines.append(
                [re.sub("^decode .*?,", "decode,", work), str(threads), *map(_time, seconds), times, f"{share:.2f}"]
            )
        machines = dict.fromkeys(f"{run['machine']}, {run['date'][:10]}" for run in runs)
        parts.append(f"{markdown_table(lines)}\n\n{'; '.join(machines)}.")
    return "\n\n".join(parts) or "Not measured yet."


def peers_table(folder: Path = ROOT / "benchmarks/results") -> str:
    """Other projects' gated delta rule, a row per work and number of threads of ``peers-*.json``: how many times our time."""
    parts = []
    for record in _records(folder, "peers-*.json"):
        works: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
        for row in record["rows"]:
            works.setdefault((row["work"], row["threads"]), {})[row["contender"]] = row
        peers = list(dict.fromkeys(row["contender"] for row in record["rows"] if row["contender"] != "native"))
        lines = [["work", "threads", "native", *(NAMES.get(peer, peer) for peer in peers)], ["---"] * (len(peers) + 3)]
        for (work, threads), rows in sorted(works.items(), key=lambda item: (item[0][0], item[0][1])):
            ratios = (f"{rows[peer]['ratio']:.2f}\N{MULTIPLICATION SIGN}" if peer in rows else "" for peer in peers)
            lines.append([work, str(threads), _time(rows["native"]["median"]), *ratios])
        parts.append(
            f"{markdown_table(lines)}\n\n{record['machine']}, {record['date'][:10]}. {_errors(record['rows'])}."
        )
    return "\n\n".join(parts) or "Not measured yet."


def _errors(rows: Sequence[dict[str, Any]]) -> str:
    """The largest error of every contender, in the order of the rows."""
    worst: dict[str, float] = {}
    for row in rows:
        worst[row["contender"]] = max(row["error"], worst.get(row["contender"], 0))
    errors = ", ".join(f"{NAMES.get(name, name)} {error:.0e}" for name, error in worst.items())
    return f"Largest error against the float64 oracle: {errors}"


def speed_figures(folder: Path = ROOT / "benchmarks/results") -> list[Any]:
    """Cost against length, and its growth, from ``scan-avx512.json``."""
    from efla.bench.section import growth_figure, lengths_figure
    from efla.runs.timing import Measurement

    record = json.loads((folder / "scan-avx512.json").read_text())
    fields = Measurement.__dataclass_fields__
    rows = [Measurement(**{name: value for name, value in row.items() if name in fields}) for row in record["rows"]]
    machine = f"{record['machine']}, {_threads(record['threads'])}"
    return [
        draw(rows, name, machine) for draw, name in ((lengths_figure, "cost_against_length"), (growth_figure, "growth"))
    ]


def runtimes_table(folder: Path = ROOT / "benchmarks/results") -> str:
    """Tokens per second, size and held-out loss, a row per model, runtime and number of threads of ``runtimes-*.json``."""
    lines = [["model", "runtime", "threads", "tokens/s", "file", "held-out loss", "torch's tokens"], ["---"] * 7]
    notes = []
    for record in _records(folder, "runtimes-*.json"):
        for row in record["rows"]:
            cells = [row["model"], row["contender"], str(row["threads"]), f"{row['per_second']:,.0f}"]
            cells += [
                f"{row['bytes'] / 1e6:,.2f} MB",
                f"{row['held_out_loss']:.4f}",
                "yes" if row["same_tokens"] else "no",
            ]
            lines.append(cells)
        steps = "; ".join(f"{name}: {how}" for name, how in record["trained"].items())
        notes.append(f"{record['machine']}, {record['date'][:10]}. Trained for {steps}.")
    return f"{markdown_table(lines)}\n\n{' '.join(notes)}" if notes else "Not measured yet."


def _records(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


class Group(NamedTuple):
    """One piece of work in one run: our median, and every contender's time by ours."""

    work: str
    threads: int
    simd: str
    machine: str
    seconds: float
    ratios: dict[str, float]


def _groups(record: dict[str, Any]) -> list[Group]:
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in record["rows"]:
        found.setdefault((row["work"].partition(" (")[0], row.get("threads", record["threads"])), {})[
            row["contender"]
        ] = row
    groups = []
    for (work, threads), rows in found.items():
        ours = next((name for name in rows if name.startswith(OURS[:2])), ACCELERATED)
        if ours not in rows:
            continue
        ratios = {
            name: row.get("ratio") or row["median"] / rows[ours]["median"] for name, row in rows.items() if name != ours
        }
        simd = record["facts"]["SIMD (native)"].split()[0]
        groups.append(Group(work, threads, simd, record["machine"], rows[ours]["median"], ratios))
    return groups


def _time(seconds: float) -> str:
    return next(f"{seconds * 10**p:.3g} {unit}" for p, unit in ((0, "s"), (3, "ms"), (6, "µs")) if seconds * 10**p >= 1)


def _times(ratio: float) -> str:
    return f"{ratio:.{int(ratio < 100)}f}\N{MULTIPLICATION SIGN}"


def _own_time(group: Group, usual_threads: int) -> str:
    return _time(group.seconds) + f", {_threads(group.threads)}" * (group.threads != usual_threads)


def _speed(group: Group, usual_threads: int) -> str:
    others = sorted(group.ratios.items(), key=lambda pair: pair[1])
    return "; ".join(
        [_own_time(group, usual_threads), *(f"{NAMES.get(name, name)} **{_times(ratio)}**" for name, ratio in others)]
    )


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def markdown_table(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
