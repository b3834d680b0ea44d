"""A double of llama.cpp's C interface over this engine's own model, by the rules that llama.cpp
0c1e570 keeps: a removal of 1 .. n_rs_seq tokens is accepted while none is pending, whatever the
planes hold; architectures without planes give 0; states are handed out in its format.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.batch import Span, UBatch
from engine.compare.llama_api import Value
from engine.compare.llama_cpp import ON_DEVICE, PARTIAL, WHOLE, LlamaCommands
from engine.compare.llama_process import LlamaEngine
from engine.compare.memory_script_parser import read_script
from engine.compare.state_blob import decode_state
from engine.memory.hybrid import HybridMemory
from engine.memory.state_file import SequenceCheckpoint
from engine.model.hybrid import HybridModel
from engine.model.mixers import layout_of
from engine.model.recurrence import StateKey
from engine.options import RunOptions
from engine.options.llama_cpp import LlamaSettings
from engine.session import Session
from resources import ROLLBACK_SCRIPTS

MAGIC = 0xAF143CD8


def use(monkeypatch: pytest.MonkeyPatch, fake: FakeLlama) -> None:
    """Let lanes of llama.cpp open the double, in this process."""

    def opened(path: Path, library: Path | None, settings: LlamaSettings) -> LlamaEngine:
        fake.library = library
        return LlamaHere(path, fake, settings)

    monkeypatch.setattr("engine.compare.peer_lane.open_llama", opened)


def with_scripts(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let check-rollback play these scripts alone."""
    scripts = tuple(read_script(ROLLBACK_SCRIPTS / f"{name}.toml") for name in names)
    monkeypatch.setattr(
        "engine.compare.memory_script_parser.memory_scripts", lambda folder: scripts
    )


def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no package with llama.cpp be found."""
    monkeypatch.setattr("engine.compare.llama_library.find_spec", lambda name: None)


class LlamaHere(LlamaEngine):
    """A LlamaEngine over a double, in this process."""

    def __init__(self, path: Path, fake: FakeLlama, settings: LlamaSettings | None = None) -> None:
        self._commands = LlamaCommands(fake)
        try:
            super().__init__(path, settings)
        except BaseException:
            self.close()
            raise

    def _call(self, name: str, *values: Value | str) -> list[Value]:
        return self._commands.call(
            name, [one.encode() if isinstance(one, str) else one for one in values]
        )

    def close(self) -> None:
        self._commands.close()


class FakeContext:
    """A context. decoded: (sequence, positions) of every call."""

    def __init__(self, memory: HybridMemory, settings: SimpleNamespace) -> None:
        self.memory, self.settings = memory, settings
        self.handed = np.zeros((0, 0), np.float32)
        self.decoded: list[tuple[int, list[int]]] = []
        self.rows: dict[int, torch.Tensor] = {}
        self.on_device: dict[int, bytes] = {}


class FakeLlama:
    """The C interface. scale: what logits are multiplied by, to be wrong on purpose; scales:
    the same by the number of a context. refuses: a
    build whose removals never reach planes that the last batch has not written. drift: what is
    added to restored states. handed: what becomes of the rows that the target hands over."""

    def __init__(
        self,
        session: Session,
        scale: float = 1.0,
        *,
        loads: bool = True,
        has_planes: bool = True,
        refuses: bool = False,
        drift: float = 0.0,
        handed: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
    ) -> None:
        self.session, self.scale, self.loads = session, scale, loads
        self.change_handed = handed
        self.has_planes, self.refuses, self.drift = has_planes, refuses, drift
        self.contexts: list[FakeContext] = []
        self.scales: dict[int, float] = {}
        self.wholes: list[SequenceCheckpoint] = []
        self.freed: list[str] = []
        self.fails_at = -1
        self.library: Path | None = None
        self.llama_log_callback = lambda function=None: function
        self.layout = layout_of(session.config)
        self.tokens: dict[bytes, dict[StateKey, torch.Tensor]] = {}
        self.n_layers_written = session.config.n_layer

    @property
    def decoded(self) -> list[tuple[int, list[int]]]:
        return self.contexts[0].decoded

    @property
    def settings(self) -> SimpleNamespace:
        return self.contexts[0].settings

    def llama_log_set(self, callback, data) -> None:
        self.log = callback

    def llama_backend_init(self) -> None: ...

    def llama_version(self) -> bytes:
        return b"0.0-fake"

    def llama_print_system_info(self) -> bytes:
        return b""

    def ggml_backend_dev_count(self) -> int:
        return 1

    def ggml_backend_dev_get(self, i: int) -> int:
        return i

    def ggml_backend_dev_name(self, device: int) -> bytes:
        return b"CPU"

    def ggml_backend_dev_description(self, device: int) -> bytes:
        return b"a double"

    def llama_model_default_params(self) -> SimpleNamespace:
        return SimpleNamespace()

    def llama_context_default_params(self) -> SimpleNamespace:
        return SimpleNamespace(n_rs_seq=0, ctx_type=0)

    def llama_model_load_from_file(self, path: bytes, settings: SimpleNamespace):
        assert settings.n_gpu_layers == 0
        if not self.loads:
            self.log(2, b"a warning\n", None)
            self.log(4, b"unknown architecture\n", None)
            return None
        return path.decode()

    def llama_model_size(self, model) -> int:
        return 77

    def llama_model_n_layer(self, model) -> int:
        return self.session.config.n_layer

    def llama_model_n_embd(self, model) -> int:
        return self.session.config.n_embd

    def llama_model_get_vocab(self, model):
        return model

    def llama_vocab_n_tokens(self, vocab) -> int:
        return self.session.config.n_vocab

    def llama_init_from_model(self, model, settings: SimpleNamespace) -> FakeContext:
        settings.n_rs_seq = settings.n_rs_seq if self.has_planes else 0
        options = RunOptions(
            rollback="planes", faults=() if self.refuses else ("stale-plane",), n_ubatch=512
        )
        n_ctx = settings.n_ctx // settings.n_seq_max
        if settings.ctx_type:
            sizes = settings.n_seq_max, n_ctx, self.session.device
            memory = HybridMemory.for_layers(self.session.config.mtp_cells(), *sizes)
        else:
            memory = self.session.make_memory(options, settings.n_seq_max, n_ctx, settings.n_rs_seq)
        self.contexts.append(FakeContext(memory, settings))
        return self.contexts[-1]

    def llama_n_batch(self, context: FakeContext) -> int:
        return context.settings.n_batch

    def llama_n_rs_seq(self, context: FakeContext) -> int:
        return context.settings.n_rs_seq

    def llama_batch_init(self, n: int, embd: int, n_seq_max: int) -> SimpleNamespace:
        return SimpleNamespace(
            n_tokens=0,
            token=[0] * n,
            pos=[0] * n,
            n_seq_id=[0] * n,
            seq_id=[[0] * n_seq_max for _ in range(n)],
            logits=[0] * n,
        )

    def llama_decode(self, context: FakeContext, batch: SimpleNamespace) -> int:
        n = batch.n_tokens
        assert batch.n_seq_id[:n] == [1] * n
        seqs = [row[0] for row in batch.seq_id[:n]]
        spans: list[Span] = []
        places: dict[int, list[int]] = {}
        for seq in dict.fromkeys(seqs):
            rows = [i for i in range(n) if seqs[i] == seq]
            positions = [batch.pos[i] for i in rows]
            assert positions == list(range(positions[0], positions[0] + len(rows)))
            if positions[0] == self.fails_at:
                return 1
            context.decoded.append((seq, positions))
            outputs = [i for i in rows if batch.logits[i]]
            tokens = [batch.token[i] for i in rows]
            spans.append(Span(seq, positions[0], tokens, [rows.index(i) for i in outputs]))
            places[seq] = outputs
        context.rows = {}
        if context.settings.ctx_type:
            self._mtp(context, batch, spans[0])
            return 0
        handed = []
        for ubatch in context.memory.split(spans, 512, "equal"):
            out = self.model.forward(ubatch, context.memory)
            found = out.logits
            handed.append(out.hidden.flatten(0, 1).numpy())
            rows_of = [row // ubatch.n_seq_tokens for row in ubatch.outputs.tolist()]
            for row, logits in zip(rows_of, found, strict=True):
                context.rows[places[ubatch.seq_ids[row]].pop(0)] = logits
        context.handed = np.ascontiguousarray(self.change_handed(np.concatenate(handed)))
        return 0

    def _mtp(self, context: FakeContext, batch: SimpleNamespace, span: Span) -> None:
        n, head = len(span.tokens), self.model.head
        assert head is not None
        raw = (ctypes.c_float * (n * self.session.config.n_embd)).from_address(batch.embd)
        rows = torch.from_numpy(np.array(raw, np.float32).reshape(1, n, -1))
        places = np.arange(span.pos0, span.pos0 + n)
        ubatch = UBatch(np.array([span.tokens]), places[None], (span.seq,), np.array(span.outputs))
        out = head.forward(ubatch, rows, context.memory)
        context.rows = dict(zip(span.outputs, out.logits, strict=True))
        context.handed = np.ascontiguousarray(out.hidden[0].numpy())

    def _Z26llama_set_embeddings_nextnP13llama_contextbb(self, *_: object) -> None: ...

    def _Z26llama_get_embeddings_nextnP13llama_context(self, context: FakeContext):
        return context.handed.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    @property
    def model(self) -> HybridModel:
        return self.session.model

    def llama_get_logits_ith(self, context: FakeContext, i: int):
        scale = self.scales.get(self.contexts.index(context), self.scale)
        self.kept = np.ascontiguousarray((context.rows[i] * scale).numpy())
        return self.kept.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def llama_get_memory(self, context: FakeContext) -> HybridMemory:
        return context.memory

    def llama_memory_seq_rm(self, memory: HybridMemory, seq: int, p0: int, p1: int) -> bool:
        return memory.seq_rm(seq, p0, p1)

    def llama_memory_seq_cp(self, memory: HybridMemory, src: int, dst: int, *_: int) -> None:
        memory.seq_cp(src, dst)

    def llama_memory_seq_keep(self, memory: HybridMemory, seq: int) -> None:
        memory.seq_keep(seq)

    def llama_memory_seq_add(
        self, memory: HybridMemory, seq: int, p0: int, p1: int, shift: int
    ) -> None:
        memory.seq_add(seq, p0, p1, shift)

    def llama_memory_seq_pos_min(self, memory: HybridMemory, seq: int) -> int:
        return 0

    def llama_memory_seq_pos_max(self, memory: HybridMemory, seq: int) -> int:
        return memory.seq_pos_max(seq)

    def _blob(self, context: FakeContext, seq: int, flags: int) -> bytes:
        if flags == PARTIAL:
            return blob_of(self, context.memory, seq)
        if flags == PARTIAL | ON_DEVICE:
            context.on_device[seq] = blob_of(self, context.memory, seq)
            return struct.pack("<Ii", MAGIC, seq)
        self.wholes.append(context.memory.state(seq))
        return struct.pack("<IiI", MAGIC, seq, len(self.wholes) - 1)

    def llama_state_seq_get_size_ext(self, context: FakeContext, seq: int, flags: int) -> int:
        return len(self._blob(context, seq, flags))

    def llama_state_seq_get_data_ext(
        self, context: FakeContext, buffer, size: int, seq: int, flags: int
    ) -> int:
        blob = self._blob(context, seq, flags)
        ctypes.memmove(buffer, blob, len(blob))
        return len(blob)

    def llama_state_seq_set_data_ext(
        self, context: FakeContext, buffer, size: int, seq: int, flags: int
    ) -> int:
        blob, memory = bytes(buffer), context.memory
        if not flags:
            memory.put(seq, self.wholes[struct.unpack("<IiI", blob)[2]])
            return size
        if flags & ON_DEVICE:
            blob = context.on_device[seq]
        assert self.layout is not None and memory.recurrent is not None
        state = decode_state(blob, self.layout, self.n_layers_written)
        states = dict(self.tokens[blob])
        for key, row in state.states.items():
            drift = self.drift if key.name == "state" else 0.0
            states[key] = row * (1 + drift)
        memory.recurrent.put(seq, state.pos, states)
        return size

    def llama_n_ctx(self, context: FakeContext) -> int:
        return context.settings.n_ctx

    def llama_state_seq_save_file(
        self, context: FakeContext, path: bytes, seq: int, tokens, n: int
    ) -> int:
        blob = self._blob(context, seq, WHOLE)
        return Path(path.decode()).write_bytes(blob)

    def llama_state_seq_load_file(
        self, context: FakeContext, path: bytes, seq: int, tokens, most: int, n
    ) -> int:
        blob = Path(path.decode()).read_bytes()
        return self.llama_state_seq_set_data_ext(context, blob, len(blob), seq, WHOLE)

    def llama_batch_free(self, batch) -> None:
        self.freed.append("batch")

    def llama_free(self, context) -> None:
        self.freed.append("context")

    def llama_model_free(self, model) -> None:
        self.freed.append("model")


def blob_of(fake: FakeLlama, memory: HybridMemory, seq: int) -> bytes:
    """A sequence's recurrent states as llama.cpp writes them."""
    assert memory.recurrent is not None
    pos, live = memory.recurrent.seq_pos_max(seq), memory.recurrent.live(seq)
    parts = [
        struct.pack("<IiI", MAGIC, seq, 1),
        struct.pack("<iI", pos, 0),
        struct.pack("<II", 0, fake.n_layers_written),
    ]
    for names in (("window", "ngrams"), ("state",)):
        for layer in memory.recurrent.layout.layers:
            parts.append(struct.pack("<i", 0))
            keys = [key for name in names if (key := StateKey(layer, name)) in live]
            turned = [memory.recurrent.layout.states[key].llama_cpp_turns for key in keys]
            rows = [live[k].mT if turns else live[k] for k, turns in zip(keys, turned, strict=True)]
            for row in rows or [torch.empty(0, 0)]:
                raw = row.contiguous().numpy().tobytes()
                parts += [struct.pack("<Q", len(raw)), raw]
    blob = b"".join(parts)
    # the newest tokens, for n-grams, are no part of what llama.cpp writes
    fake.tokens[blob] = {key: row.clone() for key, row in live.items() if key.name == "tokens"}
    return blob
