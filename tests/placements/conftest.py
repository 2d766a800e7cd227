"""Ranks that stay for all tests of a file."""

import pytest
from ranks import Ranks


@pytest.fixture(scope="module", params=[2, 3], ids=lambda n: f"{n} ranks")
def ranks(request):
    started = Ranks(request.param)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def two():
    started = Ranks(2)
    yield started
    started.stop()
