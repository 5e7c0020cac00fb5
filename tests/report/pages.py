"""Looking at the pages that reports are, and at the charts in them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

Spec = dict[str, Any]


def specs_of(page: str) -> list[Spec]:
    """The Vega-Lite specifications of a page, in its order."""
    (text,) = re.findall(r'<script id="specs" type="application/json">(.*?)</script>', page, flags=re.DOTALL)
    found: list[Spec] = json.loads(text)
    return found


def charts_of(page: str) -> list[Spec]:
    """Those of curves and bars, not the forest plots."""
    return [spec for spec in specs_of(page) if "title" in spec]


def rows_of(spec: Spec, mark: str) -> list[dict[str, Any]]:
    """The data of the first layer with this mark; none if there is no such layer."""
    for layer in spec["layer"]:
        if layer["mark"]["type"] == mark:
            rows: list[dict[str, Any]] = spec["datasets"][layer["data"]["name"]]
            return rows
    return []


def encoding(spec: Spec, mark: str, channel: str) -> dict[str, Any]:
    """How the first layer with this mark uses a channel."""
    found: dict[str, Any] = next(layer for layer in spec["layer"] if layer["mark"]["type"] == mark)["encoding"][channel]
    return found


def labels_of(spec: Spec) -> tuple[str, str, str]:
    """Title, and the titles of both axes."""
    mark = "line" if rows_of(spec, "line") else "bar" if rows_of(spec, "bar") else "tick"
    return spec["title"]["text"], encoding(spec, mark, "x")["title"], encoding(spec, mark, "y")["title"]


class Markup(HTMLParser):
    """What a browser would make of a page: its tags, the text it shows, and the attributes."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._in_script = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._in_script = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._in_script else data
