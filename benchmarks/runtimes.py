"""One model on several runtimes: ``python benchmarks/runtimes.py [--models NAME…] [--threads 1] [--rounds 7]``

Tokens per second of greedy decoding, the file's size and the held-out loss, for three sizes. Each model is trained briefly on the
text of Python's documentation, so that quantisation has something to lose; a trained model is kept in ``--work`` and used again.
Rows go to benchmarks/results/runtimes-ISA.json after each model; those of other models and threads stay. The browser is headless
Chromium with the decoder of docs/explainer, and with onnxruntime-web if examples/web has it (npm install there).
"""

import argparse
import base64
import datetime
import functools
import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from efla import EflaConfig, EflaForCausalLM, bench
from efla.data import corpora
from efla.models import export_onnx
from efla.native import rows as row_kernels
from efla.onnx import Runner
from efla.runs.rows import write_atomically
from efla.runs.timing import compare, training_step
from efla.scans.backends import native

ROOT = Path(__file__).parents[1]
# Name -> width, layers, heads, inner width, training steps.
MODELS = {"tiny": (128, 2, 2, 352, 300), "4x512": (512, 4, 4, 1536, 80), "36M": (768, 5, 6, 2048, 40)}
ROWS, LENGTH = 8, 256
HELD_OUT = 16  # windows of LENGTH bytes
PROMPT, TOKENS = 8, 64
QUANTISED = {"float32": None, "int8": "int8", "int4": "int4"}
BROWSER_SECONDS = 120  # for a page that never answers
HARNESS = """<!doctype html><meta charset="utf-8"><script>{formulas}</script><script>{decoder}</script><script type="module">
const given = await (await fetch("given.json")).json();
const report = (x) => fetch("done", {{ method: "POST", body: JSON.stringify(x) }});
const best = (x) => x.reduce((at, value, i) => (value > x[at] ? i : at), 0);
async function timed(reset, next) {{
  const seconds = []; let out;
  for (let round = 0; round <= given.rounds; round++) {{
    reset(); out = []; let logits; const start = performance.now();
    for (const t of given.prompt) logits = await next(t);
    for (let i = 0; i < given.tokens; i++) {{ out.push(best(logits)); if (i + 1 < given.tokens) logits = await next(out[i]); }}
    if (round) seconds.push((performance.now() - start) / 1000);
  }}
  return [seconds, out];
}}
try {{
  if (given.web) {{
    const {{ Runner }} = await import("./runner.js"), m = await Runner.load("model.onnx");
    report(await timed(() => m.reset(), (t) => m.read([t])));
  }} else {{
    const m = new LanguageModel(await (await fetch("model.txt")).text());
    report(await timed(() => m.reset(), (t) => m.next(t)));
  }}
}} catch (error) {{ report(String(error)); }}
</script>"""


def config_of(name: str) -> EflaConfig:
    """A byte model that the page's decoder can run too."""
    width, layers, heads, inner, _ = MODELS[name]
    return EflaConfig(
        vocab_size=256, hidden_size=width, num_hidden_layers=layers, num_heads=heads, num_attention_heads=heads,
        intermediate_size=inner, tie_word_embeddings=True, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def windows(text: Any, count: int, seed: int) -> Tensor:
    """Random stretches [count, LENGTH] of a text of bytes."""
    data = torch.from_numpy(text.copy()).long()
    starts = torch.randint(len(data) - LENGTH, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([data[start : start + LENGTH] for start in starts.tolist()])


def trained(name: str, work: Path) -> EflaForCausalLM:
    """The model after its training steps, from ``work`` if it was trained before."""
    folder = work / name
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        model = EflaForCausalLM(config_of(name))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 if name == "tiny" else 6e-4)
        text, steps = corpora.load("python-docs").train, MODELS[name][-1]
        for number in range(steps):
            batch = windows(text, ROWS, number)
            loss = training_step(model, optimizer, lambda b=batch: model(b, labels=b).loss, clip=1.0)()  # type: ignore[misc]
        print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps, loss {loss:.3f}")
        model.save_pretrained(folder)
    return EflaForCausalLM.from_pretrained(folder).eval()


def held_out_loss(logits_of: Callable[[Tensor], Tensor]) -> float:
    """Nats a byte on text that was not trained on."""
    ids = windows(corpora.load("python-docs").validation, HELD_OUT, 0)
    losses = [functional.cross_entropy(logits_of(row[None])[0, :-1].float(), row[1:]) for row in ids]
    return float(torch.stack(losses).mean())


@torch.inference_mode()
def decode_loop(model: EflaForCausalLM, prompt: Tensor) -> list[int]:
    out, cache, token = [], None, prompt
    for _ in range(TOKENS):
        result = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, token = result.past_key_values, result.logits[:, -1:].argmax(-1)
        out.append(int(token))
    return out


def generate(model: EflaForCausalLM, prompt: Tensor) -> list[int]:
    with torch.inference_mode():
        mask = torch.ones_like(prompt)
        tokens = model.generate(prompt, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)
    return tokens[0, prompt.shape[1] :].tolist()  # type: ignore[no-any-return]


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measure(name: str, work: Path, threads: int, rounds: int) -> list[dict[str, object]]:
    """One row for each runtime. A runtime whose greedy tokens are not torch's says so; quantised ones may differ."""
    model = trained(name, work)
    plain = EflaForCausalLM.from_pretrained(work / name, backend="chunked").eval()
    prompt = windows(corpora.load("python-docs").validation, 1, 1)[:, :PROMPT]
    calls: dict[str, Callable[[], list[int]]] = {
        "torch, generate": lambda: row_kernels.without_kernels()(generate)(plain, prompt),
        "efla, generate": lambda: generate(model, prompt),
        "efla, decode loop": lambda: decode_loop(model, prompt),
    }
    with torch.no_grad():
        facts = dict.fromkeys(calls, (file_bytes(work / name), held_out_loss(lambda ids: model(ids).logits)))
    for kind, quantize in QUANTISED.items():
        path = work / name / f"{kind}.onnx"
        if not path.exists():
            export_onnx(model, path, quantize=quantize)
        runner = Runner(path, num_threads=threads)
        loss = held_out_loss(lambda ids, r=runner: torch.from_numpy(r(ids.numpy())[0]))  # type: ignore[misc]
        contender = f"ONNX Runtime {kind}"
        facts[contender] = path.stat().st_size, loss
        calls[contender] = lambda r=runner: [  # type: ignore[misc]
            int(step[0]) for step in r.stream_ids(prompt.numpy(), max_new_tokens=TOKENS, temperature=0)
        ]
    expected = calls["efla, decode loop"]()
    measured = compare(f"decode {TOKENS}, {name}", calls, threads=threads, rounds=rounds, items=TOKENS)
    found = [m.as_row() | {"same_tokens": calls[m.contender]() == expected} for m in measured]
    for contender, (median, tokens, facts_of) in browsers(model, name, work, prompt, rounds).items():
        facts[contender] = facts_of
        found.append(
            {
                **{"work": f"decode {TOKENS}, {name}", "contender": contender, "threads": 1, "rounds": rounds},
                **{"median": median, "per_second": TOKENS / median, "same_tokens": tokens == expected},
            }
        )
    return [
        row | dict(zip(("bytes", "held_out_loss"), facts[str(row["contender"])], strict=True)) | {"model": name}
        for row in found
    ]


def browsers(
    model: EflaForCausalLM, name: str, work: Path, prompt: Tensor, rounds: int
) -> dict[str, tuple[float, list[int], tuple[int, float]]]:
    """Median seconds, tokens, and size and loss, of the page's decoder and of onnxruntime-web, where Chromium has them."""
    if chromium() is None:
        print("browser: skipped, no chromium here")
        return {}
    packed, given = _writer().pack(model), {"prompt": prompt[0].tolist(), "tokens": TOKENS, "rounds": rounds}
    with torch.no_grad():
        loss = held_out_loss(lambda ids: _as_packed(model)(ids).logits)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        (site / "model.txt").write_text(base64.b64encode(packed).decode())
        found["browser, the explainer's decoder"] = (*_ask(site, given), (len(packed), loss))
    modules, onnx = ROOT / "examples/web/node_modules", work / name / "float32.onnx"
    if not (modules / "onnxruntime-web").exists():
        print("onnxruntime-web: skipped, run npm install in examples/web")
        return found
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        (site / "node_modules").symlink_to(modules.resolve())
        (site / "model.onnx").symlink_to(onnx.resolve())
        shutil.copy(ROOT / "examples/web/runner.js", site)
        runner = Runner(onnx, num_threads=1)
        loss = held_out_loss(lambda ids: torch.from_numpy(runner(ids.numpy())[0]))
        found["browser, onnxruntime-web float32"] = (*_ask(site, given | {"web": True}), (onnx.stat().st_size, loss))
    return found


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@functools.cache
def _writer() -> Any:
    spec = importlib.util.spec_from_file_location("write_model", ROOT / "docs/explainer/write_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _as_packed(model: EflaForCausalLM) -> EflaForCausalLM:
    """The model with the weights that the page's decoder computes with."""
    twin = EflaForCausalLM(model.config).eval()
    twin.load_state_dict(model.state_dict())
    for parameter_name, parameter in twin.named_parameters():
        if parameter.dim() == 2 and "b_proj" not in parameter_name:
            scales, weights = _writer().quantise(parameter.numpy())
            parameter.copy_(torch.from_numpy(scales[:, None] * weights))
    return twin


def _ask(site: Path, given: dict[str, Any]) -> tuple[float, list[int]]:
    """Median seconds and the tokens that a page in headless Chromium reports."""
    page = (ROOT / "docs/explainer/index.html").read_text(encoding="utf-8")
    names = ("formulas", "decoder")
    scripts = {name: re.findall(rf'<script id="{name}"[^>]*>(.*?)</script>', page, re.DOTALL)[0] for name in names}
    (site / "index.html").write_text(HARNESS.format(**scripts), encoding="utf-8")
    (site / "given.json").write_text(json.dumps(given))
    answers: list[Any] = []
    answered = threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            answers.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            answered.set()

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen(
            [
                *(str(chromium()), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *(f"--user-data-dir={profile}", f"http://127.0.0.1:{server.server_port}/index.html"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            answered.wait(BROWSER_SECONDS)
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
    if not answers or isinstance(answers[0], str):
        raise RuntimeError(f"the page in Chromium gave no times: {answers[0] if answers else 'no answer'}")
    seconds, tokens = answers[0]
    return sorted(seconds)[len(seconds) // 2], tokens


def main() -> None:
    """Measure, and merge the rows into the file of this instruction set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work", type=Path, default=ROOT / "runs/runtimes", help="folder of the trained models")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/runtimes-ISA.json")
    options = parser.parse_args()
    isa = native.simd_level().split()[0]
    output = options.output or ROOT / f"benchmarks/results/runtimes-{isa}.json"
    torch.set_num_threads(options.threads)
    for name in options.models:
        fresh = measure(name, options.work, options.threads, options.rounds)
        before = json.loads(output.read_text())["rows"] if output.exists() else []
        mine = {(name, row["threads"], row["contender"]) for row in fresh}
        kept = [row for row in before if (row["model"], row["threads"], row["contender"]) not in mine]
        record = {
            "machine": bench.processor_name(),
            "facts": bench.machine_facts(),
            "threads": options.threads,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "trained": {key: f"{size[-1]} steps of {ROWS} rows of {LENGTH} bytes" for key, size in MODELS.items()},
            "rows": kept + fresh,
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, f"{json.dumps(record, indent=1)}\n".encode())
        for row in fresh:
            print(f"{name}: {row['contender']} {row['per_second']:,.0f} tokens/s, loss {row['held_out_loss']:.4f}")
    print(f"rows: {output}")


if __name__ == "__main__":
    main()
