"""The report in a real browser: no console messages, nothing too wide on a phone, values on hover and tap."""

from __future__ import annotations

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from efla.experiments.exactness.config import profile
from efla.experiments.exactness.run import Exactness
from efla.experiments.runner import run
from efla.report.page import build
from tests.processes import LAST_RESORT
from tests.report import test_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no chromium here (Debian: apt-get install chromium)"),
]

# A page that shows the report in a frame as wide as a phone, tries it and writes down what it found.
HARNESS = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<iframe id="f" src="report.html" style="width:WIDTHpx;height:800px;border:0"></iframe><pre id="out"></pre>
<script>
document.getElementById("f").addEventListener("load", async (event) => {
  const win = event.target.contentWindow, doc = win.document, out = {};
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const drawn = () => [...doc.querySelectorAll(".chart.drawn")].every((c) => c.view);
  const settle = async () => { await wait(100); while (!drawn()) await wait(50); await wait(100); };
  await settle();
  const first = doc.querySelector("figure .chart");
  out.top = first.getBoundingClientRect().top;
  out.text = [...first.querySelectorAll("text")].map((t) => parseFloat(win.getComputedStyle(t).fontSize));
  out.background = win.getComputedStyle(doc.body).backgroundColor;
  out.ink = win.getComputedStyle(first.querySelector(".role-axis-title text")).fill;
  doc.querySelectorAll("details").forEach((d) => { d.open = true; });
  await settle();
  out.width = doc.documentElement.clientWidth;
  out.scrollWidth = doc.documentElement.scrollWidth;
  out.tooWide = [...doc.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > out.width + 1
    && !e.closest(".scroll") && !e.closest("svg") && !e.closest("nav") && e.className !== "skip")
    .map((e) => e.tagName + "." + e.className);
  const charts = [...doc.querySelectorAll(".chart")];
  out.charts = charts.length;
  out.drawn = charts.filter((c) => c.querySelector("svg") && c.querySelector("svg").getBoundingClientRect().width > 200).length;
  out.described = charts.filter((c) => c.querySelector("[aria-label]")).length;
  const tip = doc.getElementById("tip");
  const cells = first.querySelectorAll("[class*=voronoi] path"), box = first.getBoundingClientRect();
  const at = { clientX: box.left + box.width * 0.9, clientY: box.top + 60, bubbles: true };
  cells[0].dispatchEvent(new win.PointerEvent("pointermove", at));
  out.hover = tip.textContent;
  const place = tip.getBoundingClientRect();
  out.tipInside = place.left >= 0 && place.right <= out.width + 1;
  first.dispatchEvent(new win.PointerEvent("pointerleave"));
  out.left = tip.hidden;
  cells[1].dispatchEvent(new win.MouseEvent("click", at));
  out.tap = tip.textContent;
  doc.dispatchEvent(new win.KeyboardEvent("keydown", { key: "Escape" }));
  out.escaped = tip.hidden;
  const lines = () => first.querySelectorAll(".mark-line path").length;
  const button = first.closest("figure").querySelector(".legend button");
  out.before = lines();
  button.click();
  await wait(200);
  out.after = lines();
  out.pressed = button.getAttribute("aria-pressed");
  out.focusable = doc.querySelectorAll("button, summary, .scroll[tabindex='0'], a[href]").length;
  const cell = doc.querySelector("table tbody th");
  cell.closest(".scroll").scrollLeft = 100;
  out.fixed = cell.getBoundingClientRect().left >= 0;
  document.getElementById("out").textContent = JSON.stringify(out);
});
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, list[str]]]:
    """A folder with the report, served to the browser; the requests are written down."""
    folder = tmp_path_factory.mktemp("site")
    run(Exactness(profile("quick")), folder / "exactness", executor="inline", console=Console(quiet=True))
    build([test_report.write_run(folder / "smnist"), folder / "exactness"], folder / "report.html")
    for width in (380, 1200):
        (folder / f"at-{width}.html").write_text(HARNESS.replace("WIDTH", str(width)))
    requests: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            requests.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder, requests
    server.shutdown()


def _browse(profile_folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
             "--disable-background-networking", "--enable-logging=stderr", f"--user-data-dir={profile_folder}"]  # fmt: skip
    return subprocess.run(
        [BROWSER, *fixed, *arguments], capture_output=True, text=True, timeout=LAST_RESORT, check=True
    )


def _result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    text = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text is not None
    found: dict[str, Any] = json.loads(html.unescape(text.group(1)))
    return found


def _console(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@pytest.mark.parametrize("width", [380, 1200])
def test_the_report_works_in_a_browser_by_mouse_and_tap_at_phone_and_desktop_width(
    site: tuple[str, Path, list[str]], tmp_path: Path, width: int
) -> None:
    address, _, requests = site
    requests.clear()
    done = _browse(
        tmp_path, "--window-size=1400,900", "--virtual-time-budget=30000", "--dump-dom", f"{address}/at-{width}.html"
    )
    assert _console(done) == []
    assert sorted(set(requests)) == [f"/at-{width}.html", "/report.html"], "nothing else is fetched"
    found = _result(done)
    assert found["top"] < 800, "the first screen has its picture"
    assert min(found["text"]) >= 11
    assert found["scrollWidth"] <= width
    assert found["tooWide"] == []
    assert found["charts"] == found["drawn"] == found["described"]
    assert found["charts"] >= 3 + 4 + 2 + 5 + 4
    assert "intensity multiplied by 1" in found["hover"]
    assert "EFLA" in found["hover"]
    assert "±" in found["hover"]
    assert found["tipInside"]
    assert found["left"]
    assert "intensity multiplied by" in found["tap"] and found["tap"] != found["hover"]
    assert found["escaped"]
    assert (found["before"], found["after"], found["pressed"]) == (3, 2, "false")
    assert found["focusable"] > 20
    assert found["fixed"]


def test_dark_and_light_pages_differ_and_a_printed_page_is_light(
    site: tuple[str, Path, list[str]], tmp_path: Path
) -> None:
    address, _, _ = site
    colours = {"background": [], "ink": []}  # type: dict[str, list[int]]
    for scheme in (0, 1):  # Blink: 0 is dark, 1 is light
        done = _browse(
            tmp_path / str(scheme), f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=30000",
            "--dump-dom", f"{address}/at-1200.html",
        )  # fmt: skip
        found = _result(done)
        for name, values in colours.items():
            values.append(sum(map(int, re.findall(r"\d+", found[name]))))
    assert colours["background"][0] < 150 < 700 < colours["background"][1]
    assert colours["ink"][0] > 600 > 150 > colours["ink"][1], "charts follow the page"
    _browse(tmp_path / "print", f"--print-to-pdf={tmp_path / 'report.pdf'}", f"{address}/report.html")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
