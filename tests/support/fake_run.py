"""A run without a model: scripted rounds that fill the columns which the engine fills."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from app.engine_thread.events import RunRequest
from engine.errors import OptionError
from engine.trace.records import N_TOP, PHASES
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter, this_engine

if TYPE_CHECKING:
    from tests.support.fake_session import FakeEngine

N_DRAFT = 3
_N_RS_SEQ = 3
_LENGTH_MS = 1.0


class FakeRun:
    """Drafts of three, of which 1, 2, 3 and 0 are accepted in turn; one sequence."""

    def __init__(
        self, engine: FakeEngine, request: RunRequest, compute: str, trace: TraceStore
    ) -> None:
        self._engine, self._options, self.trace = engine, request.options, trace
        self._text = request.texts[0]
        self._drafts = bool(request.options.spec.types)
        self._writer = TraceWriter.begin(
            trace,
            this_engine(),
            {
                "options": asdict(request.options),
                "compute": compute,
                "device": "cpu",
                "model": engine.identity,
                "architecture": "qwen35",
                "n_ctx": 2048,
                "n_rs_seq": _N_RS_SEQ,
                "memory_bytes": 1000,
                "synthetic": False,
                "weight_bytes": 9_400_000,
                "mmap": False,
                "snapshot_bytes": 0,
                "banned_tokens": [],
                "drafters": {},
                "threads": 1,
            },
        )
        self.run_id = self._writer.run_id
        self.done = False
        self._round = self._pos = 0
        self._ids = {piece: token_id for token_id, piece in trace.pieces.items()}

    def step(self) -> bool:
        """One round, when the gate is open."""
        self._engine.wait()
        if self.done:
            return False
        if self._round == self._engine.fail_round:
            raise RuntimeError("scripted failure")
        if self._round == 0:
            self._prompt()
        elif self._drafts:
            self._draft(self._round % (N_DRAFT + 1))
        else:
            self._plain()
        self._round += 1
        if self._round >= self._engine.rounds:
            self._close("limit")
        return not self.done

    def advance(self) -> bool:
        """The same: anyone who counts steps of a script wants every single one."""
        return self.step()

    def cancel(self, seq_id: int) -> None:
        """Note it; the only sequence goes on."""
        self._engine.raise_at("cancel")
        if seq_id != 0:
            raise OptionError(f"The run has no sequence {seq_id}.", "Name 0.")
        self._engine.cancelled.append((seq_id, self._round))

    def stop(self) -> None:
        """End it."""
        if not self.done:
            self._engine.raise_at("stop")
            self._close("stopped")

    def _close(self, stop: str) -> None:
        self.done = True
        self._writer.end([stop])

    # -- rows ------------------------------------------------------------------------------

    def _prompt(self) -> None:
        self._token("prompt", self._text or " ")
        self._ubatch("prompt", 1)
        self._token("target", " first", target=True)
        self._end(0, 1, "target", rs_idx=False)

    def _plain(self) -> None:
        self._token("target", f" t{self._round}", target=True)
        self._ubatch("verify", 1)
        self._end(
            0,
            1,
            "target",
            num_draft_tokens=0,
            num_accepted_draft_tokens=0,
            sampler_draws=1,
            sampler_wrong=0,
        )

    def _draft(self, accepted: int) -> None:
        drafted = [f" a{self._round}.{i}" for i in range(N_DRAFT)]
        for i, piece in enumerate(drafted):
            kind = "accepted" if i < accepted else "rejected" if i == accepted else "ignored"
            judged = kind != "ignored"
            pos = self._pos if i < accepted else self._pos + i - accepted
            self._token(kind, piece, pos=pos, target=judged, draft_index=i)
        stop = "bonus" if accepted == N_DRAFT else "replacement"
        self._token(stop, " last", target=True)
        self.trace.drafts.append(
            run_id=self.run_id,
            round=self._round,
            seq_id=0,
            drafter="draft-mtp",
            num_raw=N_DRAFT,
            num_draft_tokens=N_DRAFT,
            reason="n-max",
            draft_ms=_LENGTH_MS,
            num_wrong_rows=0,
            confidence=0.9,
            num_wrong_tokens=0,
        )
        self._ubatch("verify", 1 + N_DRAFT)
        self._end(
            accepted,
            accepted + 1,
            stop,
            drafter="draft-mtp",
            accept_rule="match",
            num_draft_tokens=N_DRAFT,
            num_accepted_draft_tokens=accepted,
            sampler_draws=accepted + 1,
            sampler_wrong=0,
        )

    def _token(
        self,
        kind: str,
        piece: str,
        *,
        pos: int | None = None,
        target: bool = False,
        draft_index: int | None = None,
    ) -> None:
        token_id = self._ids.setdefault(piece.encode(), len(self._ids))
        self.trace.pieces[token_id] = piece.encode()
        tops = {"top_id": [token_id] * N_TOP, "top_p": [0.9] + [0.01] * (N_TOP - 1)}
        values: dict[str, object] = {}
        if target:
            values |= {"target_p": 0.9, "rule_p": 1.0, "target_rank": 1, "target_entropy": 0.4}
            values |= {f"target_{name}": value for name, value in tops.items()}
        if draft_index is not None:
            values |= {"draft_index": draft_index, "draft_p": 0.8}
            values |= {f"draft_{name}": value for name, value in tops.items()}
        self.trace.tokens.append(
            run_id=self.run_id,
            round=self._round,
            seq_id=0,
            pos=self._pos if pos is None else pos,
            kind=kind,
            token_id=token_id,
            **values,
        )
        if kind not in ("rejected", "ignored"):
            self._pos += 1

    def _ubatch(self, purpose: str, width: int) -> None:
        self.trace.ubatches.append(
            run_id=self.run_id,
            round=self._round,
            ubatch=self._round,
            n_seqs=1,
            n_seq_tokens=width,
            seq_ids="0",
            n_padding=0,
            purpose=purpose,
            reason="end of batch",
            ms=_LENGTH_MS,
            pos_gap=0,
        )

    def _end(
        self, accepted: int, emitted: int, stop: str, *, rs_idx: bool = True, **values: object
    ) -> None:
        depth = (N_DRAFT - accepted) if values.get("num_draft_tokens") else 0
        if rs_idx:
            values |= {"rs_idx_before": 0, "rs_idx_after": depth}
        phases = {f"{phase}_ms": 0.0 for phase in PHASES} | {"verify_ms": _LENGTH_MS}
        self.trace.rounds.append(
            run_id=self.run_id,
            round=self._round,
            seq_id=0,
            t_ms=_LENGTH_MS * (self._round + 1),
            total_ms=_LENGTH_MS,
            pos0=self._pos - emitted,
            num_target_tokens=1,
            num_emitted=emitted,
            stop_kind=stop,
            rollback_depth=depth,
            memory_rollback=depth,
            rollback_path="seq_rm" if depth else "none",
            n_rs_seq=_N_RS_SEQ,
            valid_depth=_N_RS_SEQ,
            replay_index=0,
            verify_width=1 + (N_DRAFT if values.get("num_draft_tokens") else 0),
            ubatch_ids=str(self._round),
            attention_pos_max=self._pos - 2,
            recurrent_pos_max=self._pos - 2,
            kv_cells_used=self._pos - 1,
            kv_cells_duplicate=0,
            state_bytes_written=100,
            state_bytes_copied=0,
            state_bytes_restored=0,
            checkpoint_bytes=0,
            memory_bytes_held=1000,
            **values,
            **phases,
        )
        self.trace.memory.append(
            run_id=self.run_id, round=self._round, seq_id=0, slot=0, state="live", age=0
        )
