"""The backends as a fixture: ``backend`` is the name of each in turn, and "native" comes with every instruction set."""

from __future__ import annotations

import pytest

from tests.scans.cases import CONTENDERS, contender


@pytest.fixture(params=CONTENDERS)
def backend(request):
    with contender(request.param) as name:
        yield name
