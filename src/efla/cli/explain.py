"""``efla explain``: the method as one interactive page."""

from __future__ import annotations

import shutil
import webbrowser
from pathlib import Path

# In a wheel, and in the repository.
_PLACES = (Path(__file__).parents[1] / "explainer/index.html", Path(__file__).parents[3] / "docs/explainer/index.html")


def explain(
    output: Path | None = None,
) -> int:
    """Open a page in the browser that explains the method: pictures you can drag, and a language model that writes.

    The page is one file that needs no network. Without a browser, its address is printed.

    Args:
        output: Write the page to this file, or as efla.html into this folder, instead of opening it.
    """
    page = next((place for place in _PLACES if place.is_file()), None)
    if page is None:
        raise FileNotFoundError(f"the page is not installed ({_PLACES[0]} is missing); reinstall efla")
    if output is None:
        print(f"{page.as_uri()}\nnext: efla reproduce smnist --profile quick")
        webbrowser.open(page.as_uri())
        return 0
    target = output / "efla.html" if output.is_dir() else output
    shutil.copyfile(page, target)
    print(f"{target}: {target.stat().st_size:,} bytes; open it in a browser")
    return 0
