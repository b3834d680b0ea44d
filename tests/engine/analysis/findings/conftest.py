"""A trace for rows made by hand."""

from __future__ import annotations

import pytest

from engine.trace.store import TraceStore
from tests.support.round_rows import add_round, new_run


@pytest.fixture
def store() -> TraceStore:
    store = TraceStore()
    new_run(store)
    add_round(store, 0)
    return store
