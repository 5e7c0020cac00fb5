"""Charts drawn with Vega-Lite: interactive in the report, and as SVG, PNG and PDF files.

A drawing names its colours by CSS variables (``var(--c-efla)``). The report defines them for light and dark pages;
:func:`save` puts the values of one theme in their place. Altair is imported when something is drawn.
"""

import colorsys
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from efla.runs.chart import FEW, Chart, Figure, Series, describe, tidy
from efla.runs.names import LOOKS
from efla.runs.rows import write_atomically
from efla.runs.statistics import NOT_JUDGED, NOT_SEEN, REVERSED, SEEN, Claim

FORMATS = ("svg", "png", "pdf")
_CONFIG: dict[str, Any] = {
    "font": "system-ui, Segoe UI, DejaVu Sans, sans-serif",
    "background": "transparent",
    "axis": {"labelColor": "var(--soft)", "titleColor": "var(--ink)", "labelFontSize": 12, "titleFontSize": 12,
             "titleFontWeight": "normal", "gridColor": "var(--line)", "domainColor": "var(--soft)", "tickColor": "var(--soft)"},
    "legend": {"labelColor": "var(--ink)", "labelFontSize": 12, "symbolStrokeWidth": 2.5},
    "title": {"color": "var(--ink)", "fontSize": 13, "subtitleColor": "var(--soft)", "subtitleFontSize": 12},
    "text": {"fontSize": 12},
    "view": {"stroke": None},
}  # fmt: skip
DASHES = {"-": [1, 0], "--": [7, 4], ":": [2, 3], "-.": [8, 3, 2, 3]}
_LIGHT = {"paper": "#ffffff", "card": "#f6f8fa", "ink": "#1c2126", "soft": "#5a6570", "line": "#dde2e7", "link": "#0b4f8a",
          "seen": "#0a6b48", "reversed": "#a63a00", "not-seen": "#5a6570", "not-judged": "#6a5200"}  # fmt: skip
_DARK = {"paper": "#14181c", "card": "#1c2228", "ink": "#e6eaee", "soft": "#a3aeb9", "line": "#333b43", "link": "#8fc3f2",
         "seen": "#6fd3a5", "reversed": "#ff9d6b", "not-seen": "#a3aeb9", "not-judged": "#e3c567"}  # fmt: skip


def unavailable() -> str | None:
    """Why charts cannot be drawn here, or ``None``."""
    missing = [name for name in ("altair", "vl_convert") if find_spec(name) is None]
    return f"charts need {' and '.join(missing)}: pip install 'efla[experiments]'" if missing else None


def _check_available() -> None:
    if reason := unavailable():
        raise RuntimeError(reason)


def save(figure: Figure, folder: Path, formats: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Write a figure to ``NAME.svg`` and ``NAME-dark.svg``, ``NAME.png`` and ``NAME.pdf``; returns the files.

    The same figure always gives the same SVG.
    """
    _check_available()
    import altair as alt

    drawn = [chart for chart in figure.charts if chart.shown]
    columns = 3 if len(drawn) in (3, 5, 6) else 2
    symbol = "square" if any(chart.kind == "bars" for chart in drawn) else "stroke"
    canvas = _Canvas(figure.legend, interactive=False, symbol=symbol)
    panels = [canvas.draw(chart, 250 if columns == 3 else 340, 220) for chart in drawn]
    spec = canvas.spec(alt.concat(*panels, columns=columns, spacing={"row": 26, "column": 30}))
    return _write(spec, folder / figure.name, formats)


def _write(spec: dict[str, Any], path: Path, formats: Sequence[str]) -> list[Path]:
    """Write a drawing to files that begin with this path."""
    import vl_convert

    light, dark = (_themed(spec, dark=is_dark) for is_dark in (False, True))
    paper, files = {**light, "background": "white"}, dict[str, bytes]()
    if "svg" in formats:
        files[".svg"], files["-dark.svg"] = (_svg(theme).encode() for theme in (light, dark))
    if "png" in formats:
        files[".png"] = vl_convert.vegalite_to_png(paper, scale=2)
    if "pdf" in formats:
        files[".pdf"] = vl_convert.vegalite_to_pdf(paper)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = {path.with_name(f"{path.name}{ending}"): content for ending, content in files.items()}
    for file, content in written.items():
        write_atomically(file, content)
    return list(written)


def save_all(figures: Iterable[Figure], folder: Path, formats: Sequence[str] = ("svg", "png")) -> list[Path]:
    """:func:`save` each figure that has values."""
    return [file for figure in figures if figure.legend for file in save(figure, folder, formats)]


def page_spec(chart: Chart, legend: Sequence[Series]) -> dict[str, Any]:
    """The specification of a chart in the report: as wide as its box, values on hover, series hidden by a signal."""
    _check_available()
    canvas = _Canvas(legend, interactive=True)
    return canvas.spec(canvas.draw(chart, "container", 250))


def forest_spec(claims: Sequence[Claim], unit: str) -> dict[str, Any]:
    """The specification of a forest plot in the report, of claims with differences of one unit: as wide as its box."""
    _check_available()
    canvas = _Canvas((), interactive=True)
    return canvas.spec(_forest(canvas, claims, unit, "container"))


def save_forest(claims: Mapping[str, Sequence[Claim]], path: Path, formats: Sequence[str] = ("svg",)) -> list[Path]:
    """Write forest plots of claims, one below another for each unit, to files that begin with this path."""
    _check_available()
    import altair as alt

    canvas = _Canvas((), interactive=False)
    plots = [_forest(canvas, claims, unit, 760) for unit, claims in claims.items()]
    return _write(canvas.spec(alt.vconcat(*plots)), path, formats)


def _forest(canvas: "_Canvas", claims: Sequence[Claim], unit: str, width: int | str) -> Any:
    """Per claim its difference and 95 % interval, a line at zero, the paper's value."""
    import altair as alt

    sentences = [claim.sentence for claim in claims]
    rows = [
        {"claim": number, "name": claim.pair, "verdict": claim.verdict, "mean": found.mean, "low": found.low,
         "high": found.high, "paper": claim.paper, "text": claim.text(), "sentence": claim.sentence,
         "label": claim.sentence if sentences.count(claim.sentence) == 1 else f"{claim.sentence} ({claim.pair})"}
        for number, claim in enumerate(claims)
        if (found := claim.difference) is not None
    ]  # fmt: skip
    verdicts = (SEEN, NOT_SEEN, REVERSED, NOT_JUDGED)
    colours = alt.Scale(domain=verdicts, range=[f"var(--{name.replace(' ', '-')})" for name in verdicts])
    colour = alt.Color("verdict:N", legend=None, scale=colours)
    y = alt.Y("claim:O", axis=None)
    tooltip = [alt.Tooltip(f"{field}:N", title=title) for field, title in
               (("sentence", "claim"), ("name", "comparison"), ("verdict", "verdict"), ("text", "difference"))]  # fmt: skip
    base = canvas.data(rows)
    x = alt.X("low:Q", title=f"difference in {unit}: left reversed, right as claimed", axis=alt.Axis(tickCount=5))
    texts = [
        base.mark_text(align="left", dy=-9, limit=alt.expr("width"), **look).encode(y=y, text="label:N", x=alt.value(0))
        for look in ({"color": "var(--paper)", "stroke": "var(--paper)", "strokeWidth": 5}, {"color": "var(--ink)"})
    ]  # the first keeps the lines behind a label away from its letters
    layers = [
        canvas.data([{"zero": 0}]).mark_rule(color="var(--soft)").encode(x="zero:Q"),
        *texts,
        base.mark_rule(strokeWidth=2.5, yOffset=8).encode(y=y, x=x, x2="high:Q", color=colour, tooltip=tooltip),
        base.mark_circle(size=80, yOffset=8, opacity=1).encode(y=y, x="mean:Q", color=colour, tooltip=tooltip),
    ]
    if any(claim.paper is not None for claim in claims):
        diamond = base.mark_point(shape="diamond", size=80, yOffset=8, color="var(--ink)", opacity=1)
        printed = alt.Tooltip("paper:Q", title="printed in the paper")
        layers.append(diamond.encode(y=y, x="paper:Q", tooltip=[printed]))
    spoken = "; ".join(f"{claim.sentence} ({claim.pair}): {claim.verdict}, {claim.text()}" for claim in claims)
    return alt.layer(*layers, width=width, height=40 * len(rows), description=spoken)


@cache
def library() -> str:
    """Vega, Vega-Lite and vega-embed as one script that defines ``vegaEmbed``; putting it together takes seconds."""
    _check_available()
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def style_sheet() -> str:
    """The colours as CSS variables, for light pages (and paper) and for dark ones."""
    light, dark = (
        "".join(f"--{key}:{value};" for key, value in _colours(dark=is_dark).items()) for is_dark in (False, True)
    )
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"


class _Canvas:
    """Draws charts that share a legend, and keeps their data apart from the drawing: Altair copies a drawing often."""

    def __init__(self, legend: Sequence[Series], *, interactive: bool, symbol: str = "stroke") -> None:
        import altair as alt

        self.interactive, self.names = interactive, {one.key: one.label for one in legend}
        self._datasets: dict[str, list[dict[str, Any]]] = {}
        labels = [one.label for one in legend]
        self.offset = alt.XOffset("series:N", sort=labels)
        key = None if interactive else alt.Legend(title=None, orient="bottom", columns=4, labelLimit=300, symbolOpacity=1,
                                                  symbolType=symbol)  # fmt: skip
        colours = alt.Scale(domain=labels, range=[f"var(--c-{one.key})" for one in legend])
        dashes = alt.Scale(domain=labels, range=[DASHES[LOOKS[one.key].dash] for one in legend])
        self.color = alt.Color("series:N", legend=key, scale=colours)
        self.dash = alt.StrokeDash("series:N", legend=key, scale=dashes)

    def data(self, rows: Sequence[dict[str, Any]]) -> Any:
        """A drawing of these rows; numbers that are not finite are left out."""
        import altair as alt

        name = f"data{len(self._datasets)}"
        self._datasets[name] = [{key: _finite(value) for key, value in row.items()} for row in rows]
        found = alt.Chart(alt.NamedData(name=name))
        if self.interactive and rows and "series" in rows[0]:
            return found.transform_filter("indexof(hidden, datum.series) < 0")
        return found

    def spec(self, drawing: Any) -> dict[str, Any]:
        """The finished specification, with its data, fonts and colours."""
        spec: dict[str, Any] = drawing.to_dict(validate=False)
        spec.pop("$schema", None)  # an address, which nothing fetches
        if self.interactive:
            spec["params"] = [{"name": "hidden", "value": []}, *spec.get("params", ())]
        return {**spec, "config": _CONFIG, "datasets": self._datasets}

    def draw(self, chart: Chart, width: int | str, height: int) -> Any:
        """One chart: guides, then bars, or bands, curves, seeds and crosses."""
        import altair as alt

        points = [(one, point) for one in chart.shown for point in one.points]
        fields = ("x", "y", "low", "high", "text")
        rows = self.data([{f: getattr(p, f) for f in fields} | {"series": one.label} for one, p in points])
        dots = [{"x": p.x, "y": value, "series": one.label} for one, p in points for value in p.seeds]
        seeds = self.data(dots) if dots else None
        axis: dict[str, Any] = {}
        if chart.log_y and chart.y_range:
            axis = {"format": ".0e", "values": _decades(*chart.y_range), "labelOverlap": False}
        scale = _scale(chart.log_y, chart.y_range)
        y = alt.Y("y:Q", title=chart.y_label, scale=scale, axis=alt.Axis(tickCount=5, **axis))
        layers = []
        for guide in chart.guides:
            rule = self.data([{guide.axis: guide.at}]).mark_rule(color="var(--soft)", strokeDash=[3, 3])
            layers.append(rule.encode(**{guide.axis: f"{guide.axis}:Q"}))
        layers += self._curves(chart, rows, seeds, y) if chart.kind == "curves" else self._groups(chart, rows, seeds, y)
        title = alt.Title(chart.title, subtitle=chart.remarks or alt.Undefined, anchor="start")
        return alt.layer(*layers, title=title, description=describe(chart), width=width, height=height)

    def _curves(self, chart: Chart, rows: Any, seeds: Any, y: Any) -> list[Any]:
        import altair as alt

        ticks: dict[str, Any] = {} if chart.x_ticks is None else {"values": list(chart.x_ticks)}
        ticks |= {"format": "~g"} if chart.log_x else {}
        axis = alt.Axis(labelOverlap=True, tickCount=6, grid=False, **ticks)
        x = alt.X("x:Q", title=chart.x_label, scale=_scale(chart.log_x, None, padding=8), axis=axis)
        layers = []
        if any(point.low < point.high for one in chart.shown for point in one.points):
            low = alt.Y("low:Q", title=chart.y_label)
            layers.append(rows.mark_area(opacity=0.16, clip=True).encode(x=x, y=low, y2="high:Q", color=self.color))
        layers.append(rows.mark_line(clip=True, strokeWidth=2).encode(x=x, y=y, color=self.color, strokeDash=self.dash))
        if all(len(one.points) < FEW for one in chart.shown):
            layers.append(rows.mark_circle(clip=True, size=34, opacity=1).encode(x=x, y=y, color=self.color))
        if seeds is not None:
            layers.append(seeds.mark_circle(clip=True, size=14, opacity=0.6).encode(x=x, y=y, color=self.color))
        if chart.crosses:
            marks = [{"x": at, "series": self.names[key], "text": "diverged"} for key, at in chart.crosses]
            cross = self.data(marks).mark_point(shape="cross", angle=45, size=90, filled=True, opacity=1)
            layers.append(cross.encode(x=x, y=alt.value(0), color=self.color, tooltip=["series:N", "text:N"]))
        return [*layers, self._hover(chart, x)] if self.interactive else layers

    def _groups(self, chart: Chart, rows: Any, seeds: Any, y: Any) -> list[Any]:
        import altair as alt

        groups = list(dict.fromkeys(str(point.x) for one in chart.series for point in one.points))
        axis = alt.Axis(labelLimit=180, labelAngle=0 if len(groups) < 5 else -40)
        x = alt.X("x:N", title=chart.x_label, sort=groups, axis=axis)
        at: dict[str, Any] = {"x": x} if chart.kind == "dots" else {"x": x, "xOffset": self.offset}
        tooltip = [alt.Tooltip(f"{field}:N", title=title) for field, title in
                   (("x", chart.x_label), ("series", "model"), ("text", chart.y_label))]  # fmt: skip
        shape: dict[str, Any] = {"y": y, "color": self.color, "tooltip": tooltip}
        if chart.kind == "dots":
            drawn = [rows.mark_tick(thickness=2, size=22).encode(**at, **shape)]
            return drawn + ([] if seeds is None else [seeds.mark_circle(size=44).encode(**at, y=y, color=self.color)])
        layers = [rows.mark_bar(clip=True).encode(**at, **shape)]
        if any(point.low < point.high for one in chart.series for point in one.points):
            low = alt.Y("low:Q", title=chart.y_label)
            whisker = rows.mark_rule(color="var(--ink)", strokeWidth=1.2, clip=True)
            layers.append(whisker.encode(**at, y=low, y2="high:Q", tooltip=tooltip))
        if seeds is not None:
            layers.append(seeds.mark_circle(size=16, color="var(--ink)", opacity=0.8).encode(**at, y=y))
        return layers

    def _hover(self, chart: Chart, x: Any) -> Any:
        """A rule at the nearest x, with the values of all series there."""
        import altair as alt

        near = alt.selection_point(name="near", nearest=True, on="pointerover", encodings=["x"], empty=False)
        by_x: dict[Any, dict[str, Any]] = {}
        for index, one in enumerate(chart.shown):
            for point in one.points:
                row = by_x.setdefault(point.x, {"x": point.x, "at": tidy(float(point.x))})
                row[f"s{index}"] = point.text or tidy(point.y)
        tooltip = [alt.Tooltip("at:N", title=chart.x_label)]
        tooltip += [alt.Tooltip(f"s{index}:N", title=one.label) for index, one in enumerate(chart.shown)]
        opacity = alt.when(near).then(alt.value(0.5)).otherwise(alt.value(0))
        rule = self.data(list(by_x.values())).mark_rule(color="var(--soft)")
        return rule.encode(x=x, opacity=opacity, tooltip=tooltip).add_params(near)


def _scale(log: bool, ends: tuple[float, float] | None, **more: Any) -> Any:
    import altair as alt

    more |= {} if ends is None else {"domain": list(ends)}
    more |= {} if log else {"zero": False}
    return alt.Scale(type="log" if log else "linear", nice=False, **more)


def _decades(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**exponent for exponent in range(first, last + 1, max(1, math.ceil((last - first) / 6)))]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _colours(*, dark: bool) -> dict[str, str]:
    series = {f"c-{key}": _lighter(look.color) if dark else look.color for key, look in LOOKS.items()}
    return {**(_DARK if dark else _LIGHT), **series}


def _lighter(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    parts = colorsys.hls_to_rgb(hue, max(lightness, 0.66), saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _themed(spec: dict[str, Any], *, dark: bool) -> dict[str, Any]:
    colours = _colours(dark=dark)
    text = re.sub(r"var\(--([\w-]+)\)", lambda found: colours.get(found[1], found[0]), json.dumps(spec))
    themed: dict[str, Any] = json.loads(text)
    return themed


def _svg(spec: dict[str, Any]) -> str:
    """The drawing as SVG. The ids of clip paths count from 0 in each file, not in each process."""
    import vl_convert

    svg: str = vl_convert.vegalite_to_svg(spec)
    ids = list(dict.fromkeys(re.findall(r'id="(clip\d+)"', svg)))
    return re.sub(r'(?<=id=")clip\d+(?=")|(?<=url\(#)clip\d+(?=\))', lambda found: f"clip{ids.index(found[0])}", svg)
