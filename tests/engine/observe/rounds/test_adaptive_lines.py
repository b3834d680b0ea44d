"""Lines of adaptive depth in a server's log as the longest draft of each round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.errors import TraceFileError
from engine.observe.files.importing import import_file
from engine.observe.files.log_run import fill_log
from engine.trace.records import MISSING
from engine.trace.store import TraceStore

LINES = (
    # llama.cpp #27210, as posted there
    "spec       accept: adaptive draft depth seq 1: {a} -> {b} (n_draft={a}, n_accepted=4)",
    "slot       update: id  1 | task 5 | adaptive n : {a} -> {b}",
    "spec         draft: adaptive n_max seq 1: {a} -> {b}",
    "adaptive n: {a} -> {b}",
    "slot apply_adapti: id  1 | task 5 | adaptive draft-max profit: {a} -> {b} (score=9.10)",
)


def _log(change: str, steps: list[tuple[int, int, int | None]]) -> str:
    said = []
    for n, accepted, after in steps:
        said.append("slot operator(): id  0 | task 4 | accepted  1/ 2 draft tokens")
        said.append(f"slot operator(): id  1 | task 5 | accepted {accepted:2d}/{n:2d} draft tokens")
        if after is not None:
            said.append(change.format(a=n, b=after))
    return "".join(f"0.{i // 1000:02d}.{i % 1000:03d}.000 I {one}\n" for i, one in enumerate(said))


@pytest.mark.parametrize("change", LINES)
@pytest.mark.parametrize("n_more", [0, 300])
def test_each_round_has_the_length_that_was_in_force(change: str, n_more: int) -> None:
    """n_more: rounds in front, enough of them to be read as a block."""
    steps: list[tuple[int, int, int | None]] = [(3, 1, None)] * n_more
    steps += [(3, 3, 4), (4, 1, None), (4, 0, 3), (3, 2, 2), (2, 2, None)] + [(2, 1, None)] * n_more
    store = TraceStore()
    fill_log(store, _log(change, steps), "log")
    rows = store.rounds
    drafted, longest = rows.column("num_draft_tokens"), rows.column("draft_n_max")
    mine = (rows.column("seq_id") == 1) & (drafted != MISSING)
    assert drafted[mine].tolist() == [n for n, _, _ in steps]
    assert np.array_equal(longest[mine], drafted[mine])
    assert (longest[~mine] == MISSING).all()
    assert not store.runs[0].observed_findings


def test_a_length_that_no_draft_can_have_is_not_taken() -> None:
    store = TraceStore()
    fill_log(store, _log("adaptive n : {a} -> 99999999", [(3, 3, 4), (4, 4, None)]), "log")
    assert (store.rounds.column("draft_n_max") == MISSING).all()


@pytest.mark.parametrize("head", ["0.07.{n}00.000 I spec    accept: ", ""])
def test_changes_of_the_length_alone_are_not_all_rounds(tmp_path: Path, head: str) -> None:
    line = head + "adaptive n : {n} -> {m} (seq 0, n_draft={n}, n_accepted={n})\n"
    path = tmp_path / "log"
    path.write_text("".join(line.format(n=n, m=n + 1) for n in range(2, 8)))
    with pytest.raises(TraceFileError, match=r"neither a round|Lines with acceptance: 6"):
        import_file(TraceStore(), path)
