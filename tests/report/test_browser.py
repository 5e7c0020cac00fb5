"""The report in a real browser: no console messages, nothing too wide on a phone, values by mouse and by keyboard."""

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
document.getElementById("f").addEventListener("load", (event) => {
  const win = event.target.contentWindow, doc = win.document, out = {};
  const openAll = () => doc.querySelectorAll("details").forEach((d) => { d.open = true; });
  openAll();
  out.width = doc.documentElement.clientWidth;
  out.scrollWidth = doc.documentElement.scrollWidth;
  out.tooWide = [...doc.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > out.width + 1
    && !e.closest(".scroll") && !e.closest("svg") && e.className !== "skip" && e.id !== "tip")
    .map((e) => e.tagName + "." + e.className);
  const charts = [...doc.querySelectorAll("svg.chart")];
  out.charts = charts.length;
  out.drawn = charts.filter((c) => c.getBoundingClientRect().width > 200 && c.querySelectorAll("path.line").length > 0).length;
  out.background = win.getComputedStyle(doc.body).backgroundColor;
  const tip = doc.getElementById("tip"), chart = charts[0];
  chart.focus();
  out.focused = doc.activeElement === chart;
  const press = (key) => chart.dispatchEvent(new win.KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  press("ArrowRight");
  out.first = tip.textContent;
  press("ArrowRight");
  out.second = tip.textContent;
  out.shown = win.getComputedStyle(tip).visibility;
  press("Escape");
  out.hidden = win.getComputedStyle(tip).visibility;
  const box = charts[1].getBoundingClientRect();
  charts[1].dispatchEvent(new win.PointerEvent("pointermove",
    { clientX: box.left + box.width * 0.9, clientY: box.top + 20, bubbles: true }));
  out.hover = tip.textContent;
  const place = tip.getBoundingClientRect();
  out.tipInside = place.left >= 0 && place.right <= out.width + 1;
  out.focusable = doc.querySelectorAll("svg.chart[tabindex='0'], summary, .scroll[tabindex='0'], a[href]").length;
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


def _console(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@pytest.mark.parametrize("width", [380, 1200])
def test_the_report_works_in_a_browser_by_mouse_and_keyboard_at_phone_and_desktop_width(
    site: tuple[str, Path, list[str]], tmp_path: Path, width: int
) -> None:
    address, _, requests = site
    requests.clear()
    done = _browse(
        tmp_path, "--window-size=1400,900", "--virtual-time-budget=8000", "--dump-dom", f"{address}/at-{width}.html"
    )
    assert _console(done) == []
    assert sorted(set(requests)) == [f"/at-{width}.html", "/report.html"], "nothing else is fetched"
    text = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text is not None
    found = json.loads(html.unescape(text.group(1)))
    assert found["scrollWidth"] <= width
    assert found["tooWide"] == []
    assert found["charts"] == found["drawn"] == 4 + 2 + 5 + 4
    assert found["focused"]
    assert "intensity multiplied by: 1" in found["first"]
    assert "exact-flow" in found["first"]
    assert "±" in found["first"]
    assert found["second"] != found["first"]
    assert (found["shown"], found["hidden"]) == ("visible", "hidden")
    assert "noise: 0.4" in found["hover"]
    assert found["tipInside"]
    assert found["focusable"] > 20


def test_dark_and_light_pages_differ_and_a_printed_page_is_light(
    site: tuple[str, Path, list[str]], tmp_path: Path
) -> None:
    address, _, _ = site
    backgrounds = []
    for scheme in (0, 1):  # Blink: 0 is dark, 1 is light
        done = _browse(
            tmp_path / str(scheme), f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=8000",
            "--dump-dom", f"{address}/at-1200.html",
        )  # fmt: skip
        found = re.search(r"rgb\((\d+), (\d+), (\d+)\)", html.unescape(done.stdout))
        assert found is not None
        backgrounds.append(sum(map(int, found.groups())))
    assert backgrounds[0] < 150 < 700 < backgrounds[1]
    _browse(tmp_path / "print", f"--print-to-pdf={tmp_path / 'report.pdf'}", f"{address}/report.html")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
