"""Playing memory scripts: on anything with contexts, and on a session, recorded as lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.analysis.verdict import judge_lanes
from engine.compare.memory_engine import play_script
from engine.compare.memory_player import MemoryPlay
from engine.compare.memory_script import ContextSpec
from engine.compare.memory_script_parser import parse_script
from engine.errors import ContextFullError, OutOfMemoryError
from engine.memory.hybrid import HybridMemory
from engine.trace.export import export_csv
from engine.trace.reopen import open_trace
from engine.trace.store import TraceStore
from tests.support.golden_runs import session

MODEL = "qwen35-a-f32"
N_VOCAB = 50


@dataclass
class Texts:
    """A context that is not an engine: logits are a hash of the text, a rollback is always
    possible."""

    lying: bool = False
    texts: dict[int, list[int]] = field(default_factory=dict)
    batches: list[dict[int, list[int]]] = field(default_factory=list)

    def decode(self, batch: Mapping[int, Sequence[int]]) -> Mapping[int, torch.Tensor]:
        self.batches.append({seq: list(ids) for seq, ids in batch.items()})
        found = {}
        for seq, ids in batch.items():
            rows = []
            for token in ids:
                text = self.texts.setdefault(seq, [])
                text.append(token)
                seed = hash((*text, self.lying))
                rows.append(torch.rand(N_VOCAB, generator=torch.Generator().manual_seed(seed)))
            found[seq] = torch.stack(rows)
        return found

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        self.texts[seq] = self.texts[seq][:p0]
        return True

    def seq_cp(self, src: int, dst: int) -> None:
        self.texts[dst] = list(self.texts[src])

    def seq_keep(self, seq: int) -> None:
        self.texts = {seq: self.texts[seq]}

    def seq_add(self, seq: int, p0: int, p1: int, shift: int) -> None:
        raise ContextFullError("There is no shifting here.", "Leave it.")

    def save(self, seq: int, path: Path) -> None:
        path.write_text(" ".join(map(str, self.texts[seq])))

    def load(self, seq: int, path: Path) -> None:
        self.texts[seq] = list(map(int, path.read_text().split()))

    def checkpoint(self, seq: int) -> object:
        return list(self.texts[seq])

    def restore(self, seq: int, checkpoint: list[int]) -> None:
        self.texts[seq] = list(checkpoint)

    def operate(self, name: str, *numbers: int) -> None:
        getattr(self, name)(*numbers)

    def copy(self, name: str, seq: int, place: Any) -> Any:
        return self.checkpoint(seq) if name == "checkpoint" else getattr(self, name)(seq, place)

    def fact(self, seq: int, name: str) -> int | None:
        return len(self.texts.get(seq, ())) - 1 if name == "pos" else None

    def apart(self, seq: int, reference: Texts, reference_seq: int) -> None:
        return None


class OtherEngine:
    n_vocab = N_VOCAB

    def __init__(self) -> None:
        self.contexts: dict[str, Texts] = {}

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def context(self, spec: ContextSpec, policy: str) -> Texts:
        self.contexts[spec.name] = Texts(lying=spec.fault is not None)
        return self.contexts[spec.name]


def played(text: str) -> tuple[MemoryPlay, dict[str, Texts]]:
    engine = OtherEngine()
    play = MemoryPlay(parse_script("s", "s", text), "ring", engine)
    while play.step():
        pass
    return play, engine.contexts


def failures(text: str) -> list[tuple[int, str]]:
    return [(o.statement.line, o.message) for o in played(text)[0].failures]


BOTH = "context A n_seqs=2\ncontext B n_seqs=2\n"


def test_another_engine_plays_the_same_scripts() -> None:
    play, contexts = played(
        f"{BOTH}decode A 0: 1 2 3 4, 1: 60\nreplay B 0: 1 2\nsave A 0 s\nload B 1 s\n"
        "seq_rm B 1 2\ncheck A 0 0:2 = B 0 exact\ncheck A 0 = B 0 exact\nexpect B 1 pos=1 valid=9\n"
        "checkpoint B 1 c\ndecode B 1: 7\nrestore B 1 c\nseq_cp B 1 0\nseq_keep B 0\nclear A"
    )
    assert play.failures == []
    assert contexts["A"].batches == [{0: [1, 2, 3, 4], 1: [10]}]
    assert contexts["B"].batches == [{0: [1]}, {0: [2]}, {1: [7]}]
    assert contexts["B"].texts == {0: [1, 2]}
    assert contexts["A"].texts == {0: [], 1: []}
    # what cannot be seen is not judged: the states, and the depth
    assert [o.statement.action.__class__.__name__ for o in play.outcomes] == [
        "CompareRanges",
        "ExpectFacts",
    ]


def test_what_fails_is_said_and_the_rest_goes_on() -> None:
    found = failures(
        "context A\ncontext B fault=stale-plane\ndecode A 0: 1 2\ndecode B 0: 1 2\n"
        "check B 0 0:2 = A 0 0:2 nmse<=1e-3\ncheck B 0 0:2 = A 0 0:2 top1\n"
        "expect A 0 pos=5\ncheck A 0 1:3 = B 0 1:3 exact\ncheck B 0 1 = A 0 1 nmse>1e-3"
    )
    assert [line for line, _ in found] == [5, 6, 7, 8]
    assert "nmse is " in found[0][1] and "not <= 0.001" in found[0][1]
    assert "most probable token differs at 2 positions" in found[1][1]
    assert found[2:] == [(7, "pos is 1, not 5"), (8, "nothing was decoded in A 0 at 1:3")]


@pytest.mark.parametrize(
    ("line", "message"),
    [("seq_rm A 0 1 refused", "not refused"), ("seq_add A 0 0 -1 3", "no shifting here")],
)
def test_an_operation_that_goes_otherwise_ends_the_script(line: str, message: str) -> None:
    play, contexts = played(f"context A\ndecode A 0: 1 2\n{line}\ndecode A 0: 3")
    assert len(contexts["A"].batches) == 1
    assert [message in outcome.message for outcome in play.failures] == [True]


SCRIPT = """context A n_seqs=2
context B n_seqs=2
context F fault=no-conv-rollback
decode A 0: pattern[0:9], 1: pattern[0:9]
seq_rm A 1 6
decode B 1: pattern[0:6]
decode A 1: pattern[6:9]
decode B 1: pattern[6:9]
check A 1 6:9 = B 1 6:9 nmse<=1e-6
check A 1 = B 1 error<=1e-4
decode F 0: pattern[0:9]
seq_rm F 0 6
decode F 0: pattern[6:9]
check F 0 6:9 = A 0 6:9 exact
"""


def recorded() -> tuple[MemoryPlay, TraceStore]:
    trace = TraceStore()
    play = play_script(session(MODEL), parse_script("s", "s", SCRIPT), "ring", trace)
    assert [facts["lane"] for facts in trace.runs.values()] == [
        "reference",
        "ring A",
        "ring B",
        "ring F, no-conv-rollback",
    ]
    while play.step():
        pass
    return play, trace


def test_contexts_are_lanes(tmp_path: Path) -> None:
    play, trace = recorded()
    assert [outcome.statement.line for outcome in play.failures] == [14]
    reference, a, b, f = judge_lanes(trace, range(4))
    assert [lane.verdict for lane in (reference, b)] == ["reference", "reference"]
    assert (a.verdict, a.n_positions) == ("within", 3)
    assert (f.verdict, f.first_pos) == ("failed", 7)
    assert "line 14: check F 0 6:9 = A 0 6:9 exact: max_abs is" in f.error
    rows = trace.divergence
    assert rows.column("pos").tolist() == [7, 8, 9] * 2
    assert rows.column("seq_id").tolist() == [1] * 3 + [0] * 3
    # states are compared after the last token, in every layer
    layers = session(MODEL).model.recurrent_layers
    assert trace.states.column("layer").tolist() == list(layers)
    assert set(trace.states.column("pos").tolist()) == {8}
    assert (trace.states.column("state_error") < 1e-4).all()
    # and it is a trace like any other
    export_csv(trace, tmp_path / "out")
    again = open_trace(tmp_path / "out")
    assert np.allclose(again.divergence.column("nmse"), rows.column("nmse"))
    assert [lane.verdict for lane in judge_lanes(again, range(4))] == [
        "reference",
        "within",
        "reference",
        "failed",
    ]


LOOKS_BACK = """context late
context early
decode early 0: pattern[0:4]
decode late 0: pattern[0:4]
check late 0 1:4 = early 0 1:4 exact
check early 0 2:4 = late 0 2:4 exact
decode early 0: pattern[4:6]
decode late 0: pattern[4:6]
check late 0 3:6 = early 0 3:6 exact
"""


def test_a_trace_opens_again_although_its_checks_look_back(tmp_path: Path) -> None:
    trace = TraceStore()
    play = play_script(session(MODEL), parse_script("s", "s", LOOKS_BACK), "planes", trace)
    while play.step():
        pass
    export_csv(trace, tmp_path / "out")
    tokens = open_trace(tmp_path / "out").tokens  # refuses rounds that go back in a run
    assert len(tokens) == len(trace.tokens)
    # a checked position is of the batch that decoded it
    rows = trace.divergence
    late = rows.column("run_id") == 1
    assert rows.column("pos")[late].tolist() == [2, 3, 4, 5, 6]
    assert rows.column("round")[late].tolist() == [1, 1, 1, 3, 3]


def test_rounds_are_batches_with_what_was_undone_of_them() -> None:
    _, trace = recorded()
    mine = trace.rounds.column("run_id") == 1
    columns = ("round", "seq_id", "pos0", "verify_width", "rollback_depth")
    rows = [trace.rounds.column(name)[mine].tolist() for name in columns]
    assert list(zip(*rows, strict=True)) == [(0, 0, 0, 9, 0), (0, 1, 0, 9, 3), (2, 1, 6, 3, 0)]
    paths = trace.text_pool.decode(trace.rounds.column("rollback_path")[mine])
    assert paths == ["none", "seq_rm", "none"]
    assert all(facts["stops"] == ["end"] for facts in trace.runs.values())


def test_contexts_too_large_for_the_machine_are_refused_before_they_are_made() -> None:
    text = "\n".join(f"context c{i} n_seqs=64 n_rs_seq=256 n_ctx=65536" for i in range(32))
    script = parse_script("huge", "huge", text)
    trace = TraceStore()
    with pytest.raises(OutOfMemoryError, match="contexts of huge take"):
        play_script(session(MODEL), script, "planes", trace)
    assert not trace.runs


def test_contexts_that_cannot_be_made_leave_no_run_going_on(monkeypatch) -> None:
    opened, make, made = session(MODEL), HybridMemory.for_model, []

    def for_model(*arguments: Any, **options: Any) -> HybridMemory:
        if made:
            raise torch.OutOfMemoryError
        made.append(make(*arguments, **options))
        return made[0]

    monkeypatch.setattr(HybridMemory, "for_model", for_model)
    trace = TraceStore()
    with pytest.raises(OutOfMemoryError, match="no room for context B"):
        play_script(opened, parse_script("s", "s", SCRIPT), "ring", trace)
    assert [facts["stops"] for facts in trace.runs.values()] == [["failed"]] * 2


def test_a_full_context_is_said() -> None:
    script = parse_script("s", "s", "context A n_ctx=4\ndecode A 0: 1 2 3 4 5\nclear A")
    play = play_script(session(MODEL), script, "planes")
    while play.step():
        pass
    (failed,) = play.failures
    assert failed.message == "Context A has no room for 5 more tokens in 4 cells"


class Tipped(Texts):
    """Logits at the positions in `ties` depend on whether a batch is wider than a token; after a
    rollback those of a lying context depend on the first token that was removed."""

    ties: frozenset[int] = frozenset()
    stale: tuple[int, ...] = ()

    def decode(self, batch: Mapping[int, Sequence[int]]) -> Mapping[int, torch.Tensor]:
        found = super().decode(batch)
        for seq, rows in found.items():
            first = len(self.texts[seq]) - len(rows)
            for i, row in enumerate(rows):
                is_other = self.stale if self.lying else ()
                if len(rows) > 1 and first + i in self.ties:
                    is_other = (*is_other, -1)
                if is_other:
                    seed = hash((*self.texts[seq][: first + i + 1], *is_other))
                    row.copy_(torch.rand(N_VOCAB, generator=torch.Generator().manual_seed(seed)))
        return found

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        self.stale = tuple(self.texts[seq][p0 : p0 + 1])
        return super().seq_rm(seq, p0, p1)

    def restore(self, seq: int, checkpoint: list[int]) -> None:
        self.stale = tuple(self.texts[seq][len(checkpoint) :][:1])
        super().restore(seq, checkpoint)


def with_ties(text: str, *ties: int, has_ties: bool = True, is_faulty: bool = False) -> MemoryPlay:
    class Engine(OtherEngine):
        def context(self, spec: ContextSpec, policy: str) -> Texts:
            # that of the same batches without a rollback has no planes
            made = Tipped(lying=is_faulty and spec.name == "A" and spec.n_rs_seq > 0)
            made.ties = frozenset(ties)
            return made

    play = MemoryPlay(parse_script("s", "s", text), "planes", Engine(), has_ties=has_ties)
    while play.step():
        pass
    return play


UNDONE = {"removed": "seq_rm A 0 8\n", "restored": "restore A 0 c\n"}


@pytest.mark.parametrize("how", UNDONE)
def test_a_tie_that_a_batch_tips_is_no_failure_and_said(how: str) -> None:
    def script(middle: str) -> str:
        return (
            "context A n_rs_seq=3\ncontext B n_rs_seq=0\ndecode A 0: pattern[0:8]\n"
            f"checkpoint A 0 c\ndecode A 0: 1 2 3\n{middle}decode A 0: pattern[8:16]\n"
            "replay B 0: pattern[0:16]\ncheck A 0 8:16 = B 0 nmse<=1e-6"
        )

    right = with_ties(script(UNDONE[how]), 10, 13)
    assert right.failures == []
    assert len(right.tipped) == 1
    assert right.tipped[0].startswith("line 9, check A 0 8:16 = B 0 nmse<=1e-6: nmse is ")
    assert "for the same batches without a rollback, a difference of 0.0e+00" in (right.tipped[0])
    # a model without ties has none to explain it, nor can many rows be ties
    assert len(with_ties(script(UNDONE[how]), 10, 13, has_ties=False).failures) == 1
    assert len(with_ties(script(UNDONE[how]), *range(8, 13)).failures) == 1
    # what goes beyond a copy of states is not played again
    assert len(with_ties(script(UNDONE[how] + "save A 0 s\n"), 10).failures) == 1


def test_a_tie_does_not_hide_a_fault() -> None:
    script = (
        "context A n_rs_seq=3\ncontext B n_rs_seq=0\ndecode A 0: pattern[0:12]\nseq_rm A 0 9\n"
        "decode A 0: pattern[9:11]\nreplay B 0: pattern[0:11]\ncheck A 0 0:11 = B 0 nmse<=1e-6"
    )
    assert with_ties(script, 4).failures == []
    faulty = with_ties(script, 4, is_faulty=True)
    assert [one.statement.line for one in faulty.failures] == [7]
    assert faulty.tipped == []
