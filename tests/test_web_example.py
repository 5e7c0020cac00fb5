"""examples/web in a real browser: an exported model on onnxruntime-web gives torch's greedy tokens."""

from __future__ import annotations

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from efla.models import export_onnx
from tests.models.tiny import tiny_model
from tests.processes import LAST_RESORT

EXAMPLE = Path(__file__).parents[1] / "examples/web"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROMPT = "ROMEO:\n"
# Loads the page with a model, moves the temperature to 0, generates, and leaves the text and the status.
HARNESS = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<iframe id="f" src="index.html?model=model.onnx" style="width:380px;height:900px"></iframe><pre id="out"></pre>
<script>
document.getElementById("f").addEventListener("load", async (event) => {
  const doc = event.target.contentDocument, $ = (id) => doc.getElementById(id);
  const until = async (done) => { while (!done()) await new Promise((r) => setTimeout(r, 20)); };
  await until(() => !$("go").disabled || $("status").textContent.includes("could not"));
  $("temperature").value = 0;
  $("go").click();
  await until(() => $("status").textContent.includes("done") || $("status").textContent.includes("could not"));
  document.getElementById("out").textContent = JSON.stringify([$("status").textContent, $("text").textContent]);
});
</script>"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no chromium here (Debian: apt-get install chromium)"),
    pytest.mark.skipif(
        not (EXAMPLE / "node_modules/onnxruntime-web").exists(),
        reason="no onnxruntime-web: npm install in examples/web",
    ),
]


@pytest.mark.parametrize("name", ["gated", "hybrid"])
def test_the_page_generates_torchs_greedy_tokens(name, tmp_path):
    fields = {"gated": {"rule": "gated_efla"}, "hybrid": {"mixers": ["efla", "softmax"]}}[name]
    model = tiny_model(3, vocab_size=256, eos_token_id=0, bos_token_id=0, pad_token_id=0, **fields)
    site = tmp_path / "site"
    shutil.copytree(EXAMPLE, site, ignore=shutil.ignore_patterns("node_modules"))
    (site / "node_modules").symlink_to((EXAMPLE / "node_modules").resolve())
    export_onnx(model, site / "model.onnx", last_logits=True)
    (site / "at.html").write_text(HARNESS)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
        "--disable-background-networking", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=100000", "--dump-dom", f"http://127.0.0.1:{server.server_port}/at.html",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LAST_RESORT, check=True)
    server.shutdown()
    problems = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    assert problems == []
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None
    status, text = json.loads(html.unescape(found[1]))
    assert "done" in status
    ids = torch.tensor([[0, *PROMPT.encode()]])
    tokens = model.double().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False)
    expected = [token for token in tokens[0, ids.shape[1] :].tolist() if token]
    assert text == PROMPT + bytes(expected).decode(errors="replace")
