"""Peer lanes: llama.cpp on the same file and tokens with its own kernels, and the noise that its
rounding explains."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import Span
from engine.compare.lane import (
    EngineFollower,
    Follower,
    Lane,
    LaneSetup,
    ReferenceRound,
    spans_alone,
)
from engine.compare.lanes import JITTER, JITTER_ROUNDED
from engine.compare.llama_cpp import PARTIAL, WHOLE
from engine.compare.llama_process import LlamaEngine, LlamaProcess
from engine.compare.state_blob import decode_state, relative_errors
from engine.decode.round import Round
from engine.errors import PeerLibraryError, StateBlobError
from engine.memory.recurrent import RecurrentCheckpoint
from engine.model.mixers import layout_of
from engine.model.parts.attention import RINGS
from engine.model.recurrence import StateKey
from engine.options.llama_cpp import LlamaSettings
from engine.trace.facts import SourceFacts
from engine.trace.writer import TraceWriter

_FINE = 3


def open_llama(path: Path, library: Path | None, settings: LlamaSettings) -> LlamaEngine:
    """Load a model in llama.cpp. Raises like LlamaProcess."""
    return LlamaProcess(path, library, settings)


class LlamaLane(Follower):
    """A lane decoded by llama.cpp in a context of its own; its memory is known only as far as it
    can be queried."""

    def __init__(self, setup: LaneSetup, leader: Lane, engine: LlamaEngine) -> None:
        session, options, self.engine = setup.session, setup.options, engine
        version = engine.version()
        self.n_threads = torch.get_num_threads()
        self.context, self.n_rs_seq = engine.open_context(
            setup.n_seqs, setup.n_ctx, options.n_ubatch, setup.n_rs_seq, self.n_threads
        )
        self.layout, self._n_layers = layout_of(session.config), engine.n_layers
        writer = TraceWriter.begin(
            setup.trace,
            SourceFacts("llama.cpp", version),
            {
                "options": asdict(options),
                "compute": version,
                "model": session.identity,
                "architecture": session.config.architecture,
                "n_ctx": setup.n_ctx,
                "n_rs_seq": self.n_rs_seq,
                "threads": self.n_threads,
                "llama_settings": asdict(setup.llama_settings),
                "weight_bytes": engine.n_bytes,
            },
        )
        super().__init__(setup, writer.run_id)
        self.writer = writer
        self._led_by(leader)

    def forget(self, seq: int) -> None:
        self._remove_all(self.context, seq)

    def _remove_all(self, context: int, seq: int) -> None:
        """Fails the lane if the process has ended, possibly because of another lane."""
        try:
            self.engine.seq_rm(context, seq, -1)
        except PeerLibraryError as error:
            if not self.error:
                self.facts.lane_error = str(error)

    def state(self, seq: int) -> RecurrentCheckpoint | None:
        """The state that the next batch of a sequence would read, None without recurrent layers.

        Also None if the library writes states in an unknown format: the lane is then compared by
        its logits alone, and the fact `lane_unread` says why.
        """
        if self.layout is None or "lane_unread" in self.facts:
            return None
        blob = self.engine.save(self.context, seq, PARTIAL)
        try:
            return decode_state(blob, self.layout, self._n_layers)
        except StateBlobError as error:
            self.facts.lane_unread = str(error)
            return None

    def decode(self, spans: Sequence[Span]) -> Tensor:
        """Logits [n, n_vocab] of the requested rows."""
        return torch.from_numpy(self.engine.decode(self.context, spans))

    def prompt_of(self, part: Round) -> Tensor:
        """Decode a prompt alone: logits [1, n_vocab] after it."""
        return self.decode([part.span])


class PeerLane(LlamaLane):
    """Decodes the reference lane's tokens in the same batches: each sequence alone, prompts in
    ubatches, every further token by itself.

    It leads the lanes that roll back in llama.cpp. before: whole sequences as of before its last
    round. states: current states of each sequence.
    """

    def __init__(self, setup: LaneSetup, leader: Lane, n_remembered: int = 0) -> None:
        """n_remembered: positions whose states are kept, 0 for a lane without followers."""
        engine = open_llama(
            setup.session.unchanged_path(), setup.llama_library, setup.llama_settings
        )
        try:
            super().__init__(setup, leader, engine)
        except BaseException:
            engine.close()
            raise
        self._n_remembered = n_remembered
        self.before: dict[int, bytes] = {}
        self.states: dict[int, RecurrentCheckpoint | None] = {}
        self.histories: dict[int, StateHistory] = {}

    def end(self, stops: Sequence[str]) -> None:
        """End the comparison, also for the engine shared by other lanes."""
        super().end(stops)
        self.engine.close()

    def _follow(self, round_: ReferenceRound) -> None:
        parts = []
        for part in round_.parts:
            logits = self._prompt(part) if part.is_prompt else self._one_by_one(part)
            parts.append(replace(part, logits=logits))
            if self._n_remembered:
                self.states[part.seq] = self.state(part.seq)
        self._clock.stop("verify")
        rows = {part.seq: part.rows for part in parts}
        self._record_plain(round_, rows, None, wide=False)
        for part in round_.parts:
            self._compare(round_, part, rows[part.seq])
        self.round = ReferenceRound(round_.number, parts, round_.memory)

    def _prompt(self, part: Round) -> Tensor:
        history = self.histories[part.seq] = StateHistory(self._n_remembered)
        if self._n_remembered and self.layout:
            # the last ones in batches of one, to know their states
            n_wide = max(0, len(part.tokens) - self._n_remembered)
            if n_wide:
                self.decode([Span(part.seq, 0, part.tokens[:n_wide], [])])
            for pos in range(n_wide, len(part.tokens)):
                self.decode([Span(part.seq, pos, [part.tokens[pos]], [])])
                history.add(self.state(part.seq))
            self.forget(part.seq)
        return self.prompt_of(part)

    def _one_by_one(self, part: Round) -> Tensor:
        if self._n_remembered:
            self.before[part.seq] = self.engine.save(self.context, part.seq, WHOLE)
        rows = []
        for span in spans_alone(part):
            rows.append(self.decode([span]))
            if self._n_remembered and self.layout:
                self.histories[part.seq].add(self.state(part.seq))
        return torch.cat(rows)


class PeerNoiseLane(EngineFollower):
    """Decodes a peer lane's tokens with this engine's kernels, rounding like llama.cpp.

    Activations are rounded for the types of the file (mode q8, and for other types
    kernels.linear.block_parts), so its differences are those of a correct peer. Embeddings are
    jittered like those of a noise lane: the peer sums in another order, which flips a few
    roundings, and may flip a tie of two experts. The lane of seed 3 is jittered only as much as
    sums differ, so that it flips what the peer's rounding itself flips.
    """

    def __init__(self, setup: LaneSetup, leader: Lane) -> None:
        session, spec = setup.session, setup.spec
        rounds = set(session.info.quant_mix) != {"F32"}
        model = session.model_as_llama_cpp()
        jitter = JITTER_ROUNDED if rounds and spec.seed != _FINE else JITTER["f32"]
        model = model.jittered(jitter, spec.seed)
        super().__init__(setup, model, leader)
        self.facts.compute = f"{model.compute}, activations rounded as in llama.cpp"

    def _follow(self, round_: ReferenceRound) -> None:
        logits = self._one_by_one(round_)
        self._record_plain(round_, logits, self.memory, wide=False)
        for part in round_.parts:
            self._compare(round_, part, logits[part.seq])


_MUCH_NEARER = 4.0
_NEAR = 0.1


class StateHistory:
    """States at the last n positions of one sequence."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._known: OrderedDict[int, dict[str, Tensor]] = OrderedDict()

    def add(self, state: RecurrentCheckpoint | None) -> None:
        """Keep the state of its position."""
        if state is None or not state.states:
            return
        self._known[state.pos] = _of_last_layer(state)
        while len(self._known) > self._n:
            self._known.popitem(last=False)

    def position_of(self, state: RecurrentCheckpoint) -> int | None:
        """The position of a recurrent state, or of the window or ring if a layer has nothing else;
        None if it matches none of the known ones, or if two are too similar."""
        positions = self.positions_of(state)
        names = ("state", "window", *(ring for ring, _ in RINGS.values()))
        return next((positions[name] for name in names if name in positions), None)

    def positions_of(self, state: RecurrentCheckpoint) -> dict[str, int | None]:
        """The same for each state of the last recurrent layer, by name."""
        return {name: self._nearest(name, row) for name, row in _of_last_layer(state).items()}

    def _nearest(self, name: str, found: Tensor) -> int | None:
        key = StateKey(0, name)
        errors = sorted(
            (relative_errors({key: known[name]}, {key: found})[key], pos)
            for pos, known in self._known.items()
        )
        if not errors or not errors[0][0] < _NEAR:
            return None
        if len(errors) > 1 and errors[1][0] <= _MUCH_NEARER * errors[0][0]:
            return None
        return errors[0][1]


def _of_last_layer(state: RecurrentCheckpoint) -> dict[str, Tensor]:
    last = max((key.layer for key in state.states), default=-1)
    return {key.name: row for key, row in state.states.items() if key.layer == last}
