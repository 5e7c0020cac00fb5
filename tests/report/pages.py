"""Looking at the pages that reports are."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from xml.etree import ElementTree


def numbers_are_finite(page: str) -> None:
    """Every coordinate and size of every shape."""
    found = re.findall(r'(?: d|x|y|x1|x2|y1|y2|cx|cy|width|height)="([^"]*)"', page)
    assert len(found) > 50
    assert not [attribute for attribute in found if re.search("nan|inf", attribute.lower())]


@dataclass(frozen=True)
class Axis:
    """An axis as a reader takes it: the numbers printed beside it and where they stand, in pixels."""

    ticks: Sequence[tuple[float, float]]
    """(number, pixel)."""

    @property
    def is_log(self) -> bool:
        """Whether equal ratios, not equal differences, are equally far apart; the ticks must agree on one of the two."""
        fits = [self._misfit(math.log10), self._misfit(float)] if min(self.ticks)[0] > 0 else [1e9, self._misfit(float)]
        assert min(fits) < 0.2, f"ticks {self.ticks} are neither linear nor logarithmic"
        assert max(fits) > 2, f"ticks {self.ticks} do not tell linear from logarithmic"
        return fits[0] < fits[1]

    def value(self, pixel: float) -> float:
        """What a reader would read there."""
        (a, at_a), (b, at_b) = min(self.ticks), max(self.ticks)
        share = (pixel - at_a) / (at_b - at_a)
        return a * (b / a) ** share if self.is_log else a + share * (b - a)

    def _misfit(self, scale) -> float:  # type: ignore[no-untyped-def]
        (a, at_a), (b, at_b) = min(self.ticks), max(self.ticks)
        per = (at_b - at_a) / (scale(b) - scale(a))
        return max(abs(at_a + (scale(tick) - scale(a)) * per - at) for tick, at in self.ticks)


@dataclass(frozen=True)
class DrawnChart:
    """Curves and bands of a line chart in the units of its axes, read off the drawing."""

    labels: list[str]
    x: Axis
    y: Axis
    curves: list[list[tuple[float, float]]]
    """Of each curve its (x, y)."""
    bands: list[list[tuple[float, float, float]]]
    """Of each band its (x, low, high)."""


def charts_of(page: str) -> list[DrawnChart]:
    """Every line chart of a page."""
    drawn = re.findall(r'<svg [^>]*class="chart".*?</svg>.*?</svg>', page, flags=re.DOTALL)
    return [read_chart(svg) for svg in drawn if 'class="line"' in svg]


def read_chart(svg: str) -> DrawnChart:
    root = ElementTree.fromstring(svg)
    texts = [(element, element.text or "") for element in root.iter("text")]
    ticks = [(element, float(text)) for element, text in texts if element.get("class") == "tick"]
    x = Axis([(value, float(e.get("x", ""))) for e, value in ticks if e.get("text-anchor") == "middle"])
    y = Axis([(value, float(e.get("y", ""))) for e, value in ticks if e.get("text-anchor") == "end"])
    inner = root.find("svg")  # crosses of diverged runs stand outside of it
    assert inner is not None
    paths: dict[str, list[list[tuple[float, float]]]] = {"line": [], "band": []}
    for path in inner.iter("path"):
        points = [tuple(map(float, pair.split())) for pair in re.split("[MLZ]", path.get("d", "")) if pair]
        paths[path.get("class", "")].append([(x.value(a), y.value(b)) for a, b in points])
    bands = []
    for polygon in paths["band"]:
        at = itertools.groupby(sorted(polygon), key=lambda point: point[0])
        bands.append([(key, group[0][1], group[-1][1]) for key, group in ((key, list(group)) for key, group in at)])
    return DrawnChart([text for element, text in texts if element.get("class") == "label"], x, y, paths["line"], bands)


class Markup(HTMLParser):
    """What a browser would make of a page: its tags, the text it shows, and the attributes."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data
