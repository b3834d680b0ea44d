"""Memory scripts on llama.cpp's own memory, as far as its C interface allows.

Of a sequence only the last position is known; pending planes, valid depths, cells and places are
unknown and not judged. Splits, faults and prefilled storage are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine.batch import Span
from engine.compare.divergence import MemoryDifference
from engine.compare.lane_spec import LLAMA_POLICIES
from engine.compare.llama_cpp import PARTIAL
from engine.compare.llama_process import LlamaEngine
from engine.compare.memory_player import MemoryContext, MemoryEngine
from engine.compare.memory_script import ContextSpec
from engine.compare.state_blob import decode_state, state_difference
from engine.errors import OptionError, RollbackRefusedError, StateBlobError
from engine.memory.recurrent import RecurrentCheckpoint
from engine.model.mixers import layout_of
from engine.session import Session


class LlamaScriptContext(MemoryContext):
    """A context of llama.cpp's memory."""

    def __init__(self, owner: LlamaScriptEngine, spec: ContextSpec, policy: str) -> None:
        self._owner, self._engine = owner, owner.engine
        n_rs_seq = spec.n_rs_seq if policy == "planes" else 0
        self._number, found = self._engine.open_context(
            spec.n_seqs,
            spec.n_ctx,
            min(spec.n_ubatch, spec.n_ctx),
            n_rs_seq,
            torch.get_num_threads(),
            n_batch=spec.n_ctx * spec.n_seqs,
            kv_unified=True if spec.kv == "unified" else None,
        )
        owner.opened.append(self._number)
        if n_rs_seq and not found:
            raise RollbackRefusedError(
                "llama.cpp has no snapshot planes for this architecture (n_rs_seq is 0).",
                "Run scripts with --rollback checkpoint.",
            )

    def decode(self, batch: Mapping[int, Sequence[int]]) -> Mapping[int, torch.Tensor]:
        """Decode one batch, appending to each sequence: logits [n_tokens, n_vocab] of each."""
        spans = [
            Span(seq, self._engine.pos_max(self._number, seq) + 1, tokens, range(len(tokens)))
            for seq, tokens in sorted(batch.items())
        ]
        rows = torch.from_numpy(self._engine.decode(self._number, spans))
        parts = torch.split(rows, [len(span.tokens) for span in spans])
        return {span.seq: part for span, part in zip(spans, parts, strict=True)}

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        return self._engine.seq_rm(self._number, seq, p0, p1)

    def operate(self, name: str, *numbers: int) -> None:
        getattr(self._engine, name)(self._number, *numbers)

    def copy(self, name: str, seq: int, place: Any) -> tuple[int, bytes] | None:
        """Files are slot files of the library; a checkpoint is the last position of the recurrent
        states, and the states."""
        engine, number = self._engine, self._number
        if name == "checkpoint":
            return engine.pos_max(number, seq), engine.save(number, seq, PARTIAL)
        if name == "restore":
            pos, blob = place
            engine.load(number, seq, blob, PARTIAL)
            engine.seq_rm(number, seq, pos + 1)
        elif name == "save":
            engine.save_file(number, seq, place)
        else:
            engine.load_file(number, seq, place)
        return None

    def fact(self, seq: int, name: str) -> int | None:
        """The last position; other facts are unknown."""
        return self._engine.pos_max(self._number, seq) if name == "pos" else None

    def apart(
        self, seq: int, reference: LlamaScriptContext, reference_seq: int
    ) -> MemoryDifference | None:
        """Distance of the recurrent states. Cells cannot be read, so none differ."""
        try:
            mine, theirs = self._state(seq), reference._state(reference_seq)
        except StateBlobError as error:
            self._owner.unread = str(error)
            return None
        layout = self._owner.layout
        if mine is None or theirs is None or layout is None:
            return None
        return state_difference(layout, theirs, mine, 0)

    def _state(self, seq: int) -> RecurrentCheckpoint | None:
        if self._owner.layout is None:
            return None
        blob = self._engine.save(self._number, seq, PARTIAL)
        return decode_state(blob, self._owner.layout, self._owner.n_layers)


class LlamaScriptEngine(MemoryEngine):
    """See memory_player.MemoryEngine. Its contexts share a model."""

    def __init__(self, session: Session, engine: LlamaEngine) -> None:
        self.engine, self.opened = engine, list[int]()
        self.unread = ""
        """Why states are not compared, if the library writes them in an unknown format."""
        self._session = session
        self.n_vocab, self.has_ties = session.config.n_vocab, session.config.ranks
        self.n_layers, self.layout = engine.n_layers, layout_of(session.config)

    def encode(self, text: str) -> list[int]:
        return list(self._session.prompt(text).tokens)

    def close_contexts(self) -> None:
        """Close the contexts of all scripts so far."""
        for number in self.opened:
            self.engine.close_context(number)
        self.opened.clear()

    def context(self, spec: ContextSpec, policy: str) -> LlamaScriptContext:
        """Raises OptionError for what llama.cpp does not support."""
        asked = {
            "keep": spec.keep is not None,
            f"split={spec.split}": spec.split != "equal",
            f"fault={spec.fault}": spec.fault is not None,
            policy: policy not in LLAMA_POLICIES,
        }
        if wrong := [name for name, is_asked in asked.items() if is_asked]:
            raise OptionError(
                f"Context {spec.name} sets {wrong[0]}, which llama.cpp does not support.",
                f"Run the script with this engine, or with {' or '.join(LLAMA_POLICIES)}.",
            )
        return LlamaScriptContext(self, spec, policy)
