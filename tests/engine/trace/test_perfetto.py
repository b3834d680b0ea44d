"""Traces of Perfetto, read back through its own messages: durations, counters and flows are those
of the rows they come from."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from engine.errors import TraceFileError
from engine.trace.perfetto import write_perfetto
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from tests.support.trace_builder import TraceBuilder

protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")


def two_rounds() -> TraceStore:
    store = TraceStore()
    store.begin_run({})
    ids = {"run_id": 0, "seq_id": 0}
    store.rounds.append(**ids, round=0, t_ms=10.0, verify_ms=8.0, sample_ms=1.0, kv_cells_used=5)
    store.rounds.append(
        **ids,
        round=1,
        t_ms=20.5,
        draft_ms=2.0,
        verify_ms=4.0,
        sample_ms=1.5,
        rollback_ms=0.25,
        num_draft_tokens=4,
        num_accepted_draft_tokens=3,
        rollback_depth=1,
        rollback_path="seq_rm",
        kv_cells_used=9,
    )
    for slot, state in enumerate(("live", "free", "pending", "stale")):
        store.memory.append(**ids, round=1, slot=slot, state=state)
    return store


class Read:
    """Slices by track as (name, start, length, arguments) in ns, counters by track, flows."""

    def __init__(self, path: Path) -> None:
        trace = protos.Trace.FromString(path.read_bytes())
        self.names: dict[int, str] = {}
        self.parents: dict[int, int] = {}
        self.processes: list[str] = []
        self.slices: dict[int, list[tuple[str, int, int, dict[str, Any]]]] = defaultdict(list)
        self.counts: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self.flows: dict[int, list[str]] = defaultdict(list)
        opened: dict[int, list[tuple[str, int, dict[str, Any]]]] = defaultdict(list)
        times = []
        for packet in trace.packet:
            if packet.HasField("track_descriptor"):
                one = packet.track_descriptor
                self.names[one.uuid], self.parents[one.uuid] = one.name, one.parent_uuid
                if one.HasField("process"):
                    self.processes.append(one.process.process_name)
                continue
            times.append(packet.timestamp)
            event, track = packet.track_event, packet.track_event.track_uuid
            assert track in self.names
            for flow in (*event.flow_ids, *event.terminating_flow_ids):
                self.flows[flow].append(event.name)
            if event.type == event.TYPE_COUNTER:
                self.counts[self.names[track]].append(
                    (packet.timestamp, event.double_counter_value)
                )
            elif event.type == event.TYPE_SLICE_BEGIN:
                arguments = {
                    one.name: getattr(one, one.WhichOneof("value"))
                    for one in event.debug_annotations
                }
                opened[track].append((event.name, packet.timestamp, arguments))
            else:
                name, start, arguments = opened[track].pop()
                self.slices[track].append((name, start, packet.timestamp - start, arguments))
        assert times == sorted(times) and not any(opened.values())

    def named(self, name: str) -> list[tuple[str, int, int, dict[str, Any]]]:
        """Slices of the tracks of this name."""
        return [
            one
            for track, found in self.slices.items()
            if self.names[track] == name
            for one in found
        ]


def test_rounds_and_phases_are_where_the_trace_has_them(tmp_path: Path) -> None:
    path, store = tmp_path / "trace.pftrace", two_rounds()
    n = write_perfetto([RunRef(store, 0)], path)
    found = Read(path)
    assert found.processes == ["run 0"]
    first, second = found.named("sequence 0")
    assert first[:3] == ("round 0", 1_000_000, 9_000_000)
    assert second[:3] == ("round 1: 3 of 4 accepted", 12_750_000, 7_750_000)
    assert second[3]["rollback_path"] == "seq_rm" and second[3]["rollback_depth"] == 1
    assert second[3]["t_ms"] == 20.5 and "replay_ms" not in second[3]
    phases = [found.named(name)[-1] for name in ("draft", "verify", "sample", "rollback")]
    assert [one[2] for one in phases] == [2_000_000, 4_000_000, 1_500_000, 250_000]
    ends = [start + length for _, start, length, _ in phases]
    assert [start for _, start, *_ in phases] == [12_750_000, *ends[:-1]]
    assert ends[-1] == 20_500_000
    assert found.counts == {
        "kv cells": [(10_000_000, 5), (20_500_000, 9)],
        "rollback depth": [(20_500_000, 1)],
        "planes in use": [(20_500_000, 2)],
        "acceptance": [(20_500_000, 0.75)],
    }
    assert list(found.flows.values()) == [["draft", "verify", "sample"]]
    assert n == 2 * 8 + 5


def test_what_another_engine_did_not_report_is_not_there(tmp_path: Path) -> None:
    store = TraceStore()
    store.begin_run({"source": {"engine": "vllm"}})
    store.rounds.append(run_id=0, round=0, seq_id=0, t_ms=5.0, total_ms=3.0, num_draft_tokens=2)
    store.rounds.append(run_id=0, round=1, seq_id=0, num_draft_tokens=2)
    store.rounds.append(run_id=0, round=2, seq_id=0, t_ms=6.0, total_ms=3.0)
    path = tmp_path / "trace.pftrace"
    write_perfetto([RunRef(store, 0)], path)
    found = Read(path)
    rounds = found.named("sequence 0")
    assert [one[:3] for one in rounds] == [
        ("round 0", 2_000_000, 3_000_000),
        ("round 2", 5_000_000, 1_000_000),  # begins where the one before it ended
    ]
    assert rounds[1][3]["total_ms"] == 3.0
    assert not found.counts and not found.flows


def test_without_times_nothing_is_written(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.prompt("ab")
    builder.plain("c")
    with pytest.raises(TraceFileError, match="No round"):
        write_perfetto([builder.run], tmp_path / "trace.pftrace")
    assert not list(tmp_path.iterdir())


def test_sequences_side_by_side_have_tracks_of_their_own(tmp_path: Path) -> None:
    store = TraceStore()
    store.begin_run({})
    for number in range(3):
        for seq_id in (0, 1):
            store.rounds.append(
                run_id=0, round=number, seq_id=seq_id, t_ms=10.0 * (number + 1), verify_ms=4.0
            )
    path = tmp_path / "trace.pftrace"
    write_perfetto([RunRef(store, 0)], path)
    found = Read(path)
    tracks = {name: uuid for uuid, name in found.names.items() if name.startswith("sequence")}
    assert set(tracks) == {"sequence 0", "sequence 1"}
    for name, uuid in tracks.items():
        assert len(found.named(name)) == 3
        assert [found.names[one] for one, above in found.parents.items() if above == uuid] == [
            "verify"
        ]
