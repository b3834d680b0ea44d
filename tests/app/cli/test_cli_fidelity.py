"""fidelity: table and JSON on the demo's draft model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resources import DEMO_DRAFT
from tests.app.cli.conftest import Outcome

Cli = Callable[..., Outcome]


def test_the_modes_come_closer_in_their_order(cli: Cli) -> None:
    outcome = cli("fidelity", DEMO_DRAFT, "-n", 40, "-p", "import os\n", "--json")
    assert outcome.status == 0
    found = {one["compute"]: one for one in outcome.json["modes"]}
    assert list(found) == ["bf16", "int8", "int8x2", "q8"]
    assert 0 < found["int8x2"]["nmse"] < found["int8"]["nmse"] < 0.1
    assert {one["n_tokens"] for one in found.values()} == {found["int8"]["n_tokens"]}
    for one in found.values():
        assert one["max_abs"] > 0 and one["kl"] > 0 and 0.5 < one["top1"] <= 1


def test_the_table_has_a_line_per_mode(cli: Cli) -> None:
    outcome = cli("fidelity", DEMO_DRAFT, "-n", 4, "--modes", "f32,int8")
    lines = outcome.out.splitlines()
    assert lines[0].startswith("demo-draft.gguf: against f32 over ")
    assert lines[2].split() == ["mode", "NMSE", "KL,", "nats", "same", "top-1", "worst", "logit"]
    assert lines[3].split() == ["f32", "0.00e+00", "0.00e+00", "100.0", "%", "0.00e+00"]
    assert lines[4].split()[0] == "int8"


@pytest.mark.parametrize("modes", ["auto", "int8,", "fp4"])
def test_other_modes_are_wrong_usage(cli: Cli, modes: str) -> None:
    outcome = cli("fidelity", "--demo", "--modes", modes)
    assert outcome.status == 2
    assert "is not one of " in outcome.err


def test_a_full_context_is_mentioned(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.session._DEFAULT_CONTEXT", 16)
    outcome = cli("fidelity", DEMO_DRAFT, "-n", 4096, "--modes", "f32", "-p", "a")
    assert outcome.status == 0
    assert "over 15 tokens" in outcome.out
    assert "note: the context has room for only 15 more tokens" in outcome.err
