"""Only a browser needs the library that draws; putting it together takes seconds."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("browser") is None:
        monkeypatch.setattr("efla.runs.vega.library", lambda: "/* vega */")
