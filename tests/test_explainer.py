"""The explainer page: its formulas are the library's, its model is torch's, and it works in a browser at every width."""

from __future__ import annotations

import base64
import functools
import html
import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from efla import rules
from efla.models import EflaConfig, EflaForCausalLM
from tests.processes import LAST_RESORT

FOLDER = Path(__file__).parents[1] / "docs/explainer"
PAGE = FOLDER / "index.html"
NODE = shutil.which("node")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_node = pytest.mark.skipif(NODE is None, reason="no node here (Debian: apt-get install nodejs)")


@functools.cache
def script(name):
    found = re.search(rf'<script id="{name}"[^>]*>(.*?)</script>', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def run_node(code, given):
    """What the page's functions give for a JSON value."""
    assert NODE is not None
    program = f"{script('formulas')}\n{script('decoder')}\nconst given = JSON.parse(require('fs').readFileSync(0));\n"
    program += f"process.stdout.write(JSON.stringify((() => {{ {code} }})()));"
    done = subprocess.run(
        [NODE, "-e", program], input=json.dumps(given), capture_output=True, text=True, timeout=LAST_RESORT, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_every_rule_of_the_page_is_the_librarys_to_1e_9():
    generator = torch.Generator().manual_seed(0)
    beta, lam, log_gate = (
        10 ** torch.empty(500, dtype=torch.float64).uniform_(*span, generator=generator)
        for span in ((-6, 0.3), (-6, 2), (-8, 2))
    )
    lam[0], log_gate[1] = 0, 0
    given = {"names": rules.names(), "beta": beta.tolist(), "lam": lam.tolist(), "logGate": (-log_gate).tolist()}
    code = "return given.names.map((n) => given.beta.map((b, i) => Efla.rules[n](b, given.lam[i], given.logGate[i])));"
    for name, found in zip(rules.names(), run_node(code, given), strict=True):
        expected = torch.stack(rules.get(name).coefficients(beta, lam, -log_gate), dim=-1)
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)


@needs_node
@pytest.mark.parametrize("rule", ["efla", "gated_efla", "delta"])
def test_steps_and_chunks_of_the_page_are_the_librarys_scan_to_1e_9(rule):
    from efla import linear_attention

    torch.manual_seed(0)
    k, v = torch.randn(1, 12, 1, 5, dtype=torch.float64) / 2, torch.randn(1, 12, 1, 4, dtype=torch.float64)
    beta, log_gate = torch.rand(1, 12, 1, dtype=torch.float64), -torch.rand(1, 12, 1, dtype=torch.float64)
    gate = log_gate if rules.get(rule).needs_gate else None
    _, expected = linear_attention(
        k, k, v, beta, gate, rule=rule, output_final_state=True, backend="reference"
    )  # [1, 1, 5, 4]
    given = {
        "rule": rule, "k": k[0, :, 0].tolist(), "v": v[0, :, 0].tolist(), "beta": beta.flatten().tolist(),
        "logGate": log_gate.flatten().tolist(),
    }  # fmt: skip
    code = """
        const tokens = given.k.map((k, i) => ({ k, v: given.v[i] }));
        const steps = tokens.map(({ k }, i) => Efla.rules[given.rule](given.beta[i], Efla.dot(k, k), given.logGate[i]));
        const empty = given.k[0].map(() => given.v[0].map(() => 0));
        const chunks = (size) => {
          let S = empty;
          for (let t = 0; t < 12; t += size) S = Efla.chunk(S, tokens.slice(t, t + size), steps.slice(t, t + size));
          return S;
        };
        return [tokens.reduce((S, { k, v }, i) => Efla.step(S, k, v, steps[i]), empty), chunks(1), chunks(5), chunks(12)];
    """
    for found in run_node(code, given):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected[0, 0], rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def model():
    """The page's model in torch: the int8 weights times their scales, in float64."""
    packed = base64.b64decode(script("model"))
    length = int.from_bytes(packed[:4], "little")
    header = json.loads(packed[4 : 4 + length])
    config = EflaConfig(
        vocab_size=header["vocabulary"], hidden_size=header["hidden"], num_hidden_layers=header["layers"],
        num_heads=header["heads"], head_dim=header["width"], conv_size=header["conv"], norm_eps=header["eps"],
        intermediate_size=header["inner"], tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = EflaForCausalLM(config).double().eval()
    assert sum(p.numel() for p in model.parameters()) == header["parameters"]
    at = 4 + length

    def take(kind, count):
        nonlocal at
        array = np.frombuffer(packed, kind, count, at)
        at += array.nbytes
        return array.astype(np.float64)

    def floats(*modules):
        for weight in (module.weight for module in modules):
            weight.copy_(torch.from_numpy(take(np.float32, weight.numel())).view_as(weight))

    def matrix(*modules):
        rows, columns = sum(m.weight.shape[0] for m in modules), modules[0].weight.shape[1]
        scales = take(np.float32, rows)
        whole = torch.from_numpy(scales[:, None] * take(np.int8, rows * columns).reshape(rows, columns))
        for module, part in zip(modules, whole.split([m.weight.shape[0] for m in modules]), strict=True):
            module.weight.copy_(part)

    with torch.no_grad():
        matrix(model.model.embed_tokens)
        for layer in model.model.layers:
            mixer = layer.mixer
            floats(layer.mixer_norm)
            matrix(mixer.q_proj, mixer.k_proj, mixer.v_proj)
            floats(mixer.q_conv, mixer.k_conv, mixer.v_conv, mixer.b_proj, mixer.o_norm)
            matrix(mixer.o_proj)
            floats(layer.mlp_norm)
            for module in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                matrix(module)
        floats(model.model.norm)
    assert at == len(packed)
    return model


RUN = "const m = new LanguageModel(given.model);"


@needs_node
def test_the_pages_model_has_torchs_logits_and_greedy_tokens(model):
    text = [0, *b"ROMEO:\nBut soft, what light through yonder window breaks?"]
    with torch.no_grad():
        expected = model(torch.tensor([text])).logits[0]
    given = {"model": script("model").strip(), "text": text}
    found = torch.tensor(run_node(f"{RUN} return given.text.map((t) => Array.from(m.next(t)));", given)).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    prompt = torch.tensor([text])
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False)
    code = f"""{RUN} let logits; for (const t of given.text) logits = m.next(t); const state = m.save(), out = [];
        for (let i = 0; i < 60; i++) {{ out.push(LanguageModel.pick(logits, 0)); logits = m.next(out[i]); }}
        m.load(state); return [out, Array.from(m.next(out[0]))];"""
    out, again = run_node(code, given)
    assert out == tokens[0, len(text) :].tolist()
    with torch.no_grad():
        after = model(tokens[:, : len(text) + 1]).logits[0, -1]
    torch.testing.assert_close(torch.tensor(again).double(), after, rtol=0, atol=1e-6 * float(after.abs().max()))


def test_the_model_has_learnt_to_write(model):
    text = b"First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n"
    ids = torch.tensor([[0, *text]])
    with torch.no_grad():
        assert float(model(ids, labels=ids).loss) < 1.6


def test_the_models_writer_and_the_page_agree_on_the_format(model):
    spec = importlib.util.spec_from_file_location("write_model", FOLDER / "write_model.py")
    assert spec is not None and spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    assert len(writer.pack(model.float())) == len(base64.b64decode(script("model")))
    model.double()
    model.config.tie_word_embeddings = False
    with pytest.raises(ValueError, match="decoder expects tie_word_embeddings = True, got False"):
        writer.pack(model)
    model.config.tie_word_embeddings = True


def test_the_page_is_one_small_file_that_loads_nothing():
    text = PAGE.read_text(encoding="utf-8")
    assert PAGE.stat().st_size <= 600_000
    assert not re.search(r'\bsrc=|@import|url\(|\bfetch\(|XMLHttpRequest|<link(?! rel="icon" href="data:,")', text)
    assert re.findall(r'href="(http[^"]*)"', text) == ["https://arxiv.org/abs/2512.12602"]


# Shows the page in a frame, moves every control and writes down what changed.
HARNESS = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<iframe id="f" src="index.html" style="width:WIDTHpx;height:900px;border:0"></iframe><pre id="out"></pre>
<script>
document.getElementById("f").addEventListener("load", async (event) => {
  const win = event.target.contentWindow, doc = win.document, out = { changed: {} };
  const $ = (id) => doc.getElementById(id);
  const seen = () => [...doc.querySelectorAll("canvas")].map((c) => c.toDataURL()).join() +
    [...doc.querySelectorAll("section svg, .note, b")].map((e) => e.outerHTML).join();
  const until = async (done) => { for (let i = 0; i < 400 && !done(); i++) await new Promise((r) => setTimeout(r, 20)); };
  out.width = doc.documentElement.clientWidth;
  out.scrollWidth = doc.documentElement.scrollWidth;
  out.tooWide = [...doc.querySelectorAll("body *:not(svg *)")].filter((e) => e.getBoundingClientRect().right > out.width + 1)
    .map((e) => e.tagName + "." + e.className);
  $("heat").value = 0;
  $("heat").dispatchEvent(new win.Event("input"));
  await until(() => $("ghost").textContent.length >= 120);
  out.ghost = $("ghost").textContent;
  for (const [id, value] of [["norm", 2.5], ["beta", 0.3], ["gate", 0.5], ["x", 5], ["stiff", 5], ["time", 12], ["size", 4]]) {
    const before = seen();
    $(id).value = value;
    $(id).dispatchEvent(new win.Event("input", { bubbles: true }));
    out.changed[id] = seen() !== before;
  }
  out.text = $("stream-text").textContent;
  out.focusable = doc.querySelectorAll("input, button, textarea").length;
  out.background = win.getComputedStyle(doc.body).backgroundColor;
  $("paper").value = "JULIET:";
  $("paper").dispatchEvent(new win.Event("input"));
  await until(() => $("ghost").textContent !== out.ghost && $("ghost").textContent.length >= 120);
  out.juliet = $("ghost").textContent;
  document.getElementById("out").textContent = JSON.stringify(out);
});
</script>"""


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no chromium here (Debian: apt-get install chromium)")
@pytest.mark.parametrize(("width", "scheme"), [(380, 1), (1280, 0)], ids=["phone-light", "desktop-dark"])
def test_the_page_works_in_a_browser(width, scheme, model, tmp_path):
    (tmp_path / "site").mkdir()
    shutil.copy(PAGE, tmp_path / "site")
    (tmp_path / "site/at.html").write_text(HARNESS.replace("WIDTH", str(width)))
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *arguments):
            requests.append(self.path)

    folder = str(tmp_path / "site")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
        "--disable-background-networking", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
        f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1400,900", "--virtual-time-budget=60000",
        "--dump-dom", f"http://127.0.0.1:{server.server_port}/at.html",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LAST_RESORT, check=True)
    server.shutdown()
    assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line] == []
    assert sorted(set(requests)) == ["/at.html", "/index.html"], "nothing else is fetched"
    text = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text is not None and text[1], "the page did not get to its end"
    found = json.loads(html.unescape(text[1]))
    assert found["scrollWidth"] <= width
    assert found["tooWide"] == []
    assert all(found["changed"].values()), found["changed"]
    assert "After 12 tokens" in found["text"]
    assert found["focusable"] == 12
    assert (sum(map(int, re.findall(r"\d+", found["background"])[:3])) < 150) == (scheme == 0)
    for prompt, ghost in (("ROMEO:\nWhat light through yonder ", found["ghost"]), ("JULIET:", found["juliet"])):
        ids = torch.tensor([[0, *prompt.encode()]])
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=120, do_sample=False)
        assert ghost == bytes(tokens[0, ids.shape[1] :].tolist()).decode()
