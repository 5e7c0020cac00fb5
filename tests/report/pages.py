"""Looking at the pages that reports are."""

from __future__ import annotations

import re


def numbers_are_finite(page: str) -> None:
    """Every coordinate and size of every shape."""
    found = re.findall(r'(?: d|x|y|x1|x2|y1|y2|cx|cy|width|height)="([^"]*)"', page)
    assert len(found) > 50
    assert not [attribute for attribute in found if re.search("nan|inf", attribute.lower())]
