"""A fingerprint of what the commands compute, to show that a refactoring changed nothing.

    python tests/fingerprint.py save FOLDER          run the commands (about ten minutes on two cores) and keep their numbers
    python tests/fingerprint.py compare OLD NEW      exit 1 and list what differs

It uses the command line and files only, so the same script runs before and after modules move. Kept: rows of the quick
profiles, metrics of 40 training steps, an evaluation of the model they give, the numbers of the report on results/, and
whether every folder of results/ is still accepted. Left out of the comparison: times, versions, commits and machines.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Names of fields that change from run to run. (Whole words: "eta" would also leave out every beta.)
VOLATILE = re.compile(
    r"(^|_)(seconds|timing|wall|versions?|commit|machine|memory|time|date|host|started|finished|eta)(_|$)|per_second"
)

# name -> arguments of `efla`; "{out}" is the folder of the fingerprint.
COMMANDS = {
    "exactness": "reproduce exactness --profile quick --output {out}/exactness",
    "smnist": "reproduce smnist --profile quick --output {out}/smnist",
    "mad": "reproduce mad --profile quick --output {out}/mad",
    "lm": "reproduce lm --profile quick --output {out}/lm",
    "train": "train --steps 40 --threads 1 --validate-every 20 --save-every 20 --output {out}/train",
    "eval": "eval {out}/train/model --tasks paper --limit 20 --output {out}/eval",
    "report": "report {results} --output {out}/report.html",
}
# Commands that continue a folder of results/: one that no longer fits its protocol is refused, and a complete one adds nothing.
RESULTS = {
    "exactness-full": "reproduce exactness --profile full",
    "smnist-full": "reproduce smnist --profile full",
    "mad": "reproduce mad --profile full",
    "lm": "reproduce lm --profile full",
    "throughput": "reproduce throughput --profile full",
}


def efla(arguments: str) -> str:
    command = [sys.executable, "-m", "efla", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ, check=False)
    if done.returncode:
        raise SystemExit(f"efla {arguments} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_volatile(x) for key, x in value.items() if not VOLATILE.search(key)}
    return [without_volatile(x) for x in value] if isinstance(value, list) else value


def numbers_of(page: str) -> list[str]:
    """The numbers in a page's text, in order."""
    page = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    return re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", re.sub(r"<[^>]*>", " ", page))


def collect(folder: Path) -> dict[str, Any]:
    """Every JSON line below the folder, and the report's numbers, without what changes from run to run."""
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*.jsonl")):
        lines = [without_volatile(json.loads(line)) for line in file.read_text().splitlines()]
        # Cells finish in another order from run to run.
        found[str(file.relative_to(folder))] = sorted(json.dumps(line, sort_keys=True) for line in lines)
    found["report"] = numbers_of((folder / "report.html").read_text())
    return found


def save(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    results = " ".join(f"results/{name}" for name in RESULTS)
    for name, arguments in COMMANDS.items():
        if (folder / f"{name}.done").exists():
            continue
        print(name, flush=True)
        efla(arguments.format(out=folder.resolve(), results=results))
        (folder / f"{name}.done").touch()
    for name, arguments in RESULTS.items():
        print(f"results/{name}", flush=True)
        rows = ROOT / "results" / name / "rows.jsonl"
        before = rows.read_bytes()
        copy = folder / "accepted" / name
        copy.mkdir(parents=True, exist_ok=True)
        for file in rows.parent.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        efla(f"{arguments} --output {copy.resolve()}")
        if (copy / "rows.jsonl").read_bytes() != before:
            raise SystemExit(f"results/{name} is accepted, but cells were run again")
    (folder / "fingerprint.json").write_text(json.dumps(collect(folder), indent=1))


def compare(old: Path, new: Path) -> int:
    a, b = (json.loads((folder / "fingerprint.json").read_text()) for folder in (old, new))
    differing = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    for name in differing:
        pairs = zip(a.get(name, []), b.get(name, []), strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), ("a different number of lines", ""))
        print(f"{name} differs, first:\n  {str(first[0])[:500]}\n  {str(first[1])[:500]}")
    print(f"{len(a.keys() | b.keys()) - len(differing)} of {len(a.keys() | b.keys())} files are the same")
    return 1 if differing else 0


if __name__ == "__main__":
    if sys.argv[1] == "save":
        save(Path(sys.argv[2]))
    else:
        sys.exit(compare(Path(sys.argv[2]), Path(sys.argv[3])))
