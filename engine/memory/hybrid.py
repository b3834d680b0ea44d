"""Memory of a hybrid model: attention cells and recurrent states, which change together; and a
shelf of memories of finished runs, for later runs of the same session.

Recorded passes (engine.machine.graphs) are bound to the storage they were recorded with, and
recording them takes as long as dozens of steps. A later run in the same storage reuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from threading import Lock

import torch
from torch import Tensor

from engine.batch import (
    GreedyTokens,
    Span,
    UBatch,
    UBatchTensors,
    split_equal,
    split_seq,
    split_simple,
)
from engine.errors import OptionError
from engine.gguf.part_file import check_mapped
from engine.machine.graphs import DecodeOn, PassInputs, StepGraphs, graphs_for
from engine.memory.kv import AttentionKV
from engine.memory.kv_storage import key_rotation
from engine.memory.options import StateTypes
from engine.memory.policies import POLICIES
from engine.memory.recurrent import SnapshotPolicy
from engine.memory.state_file import SequenceCheckpoint
from engine.model.config import ModelConfig
from engine.model.memory import ModelMemory
from engine.model.mixers import layout_of
from engine.model.parts import CellKey, CellSize
from engine.model.recurrence import StateKey
from engine.model.recurrent_states import stored_as
from kernels.dispatch import uses_llvm
from kernels.rows.record import decode_on

_SHORT = 65  # most tokens of a verify batch; longer rows of single tokens would be wasteful


class HybridMemory(ModelMemory):
    """Attention cells and recurrent states of n_seqs sequences. recurrent is None if dense.

    batch_invariant: results have the same bits in batches of every shape. graphs: recordings of
    forward passes, None if passes are not recorded.

    Every operation asks the recurrent part first, because only that part can refuse.
    """

    attention: AttentionKV
    recurrent: SnapshotPolicy | None

    def __init__(
        self,
        attention: AttentionKV,
        recurrent: SnapshotPolicy | None,
        faults: Collection[str] = (),
        *,
        batch_invariant: bool = False,
        graphs: StepGraphs | None = None,
    ) -> None:
        self.attention = attention
        self.recurrent = recurrent
        self.batch_invariant = batch_invariant
        if recurrent:
            recurrent.batch_invariant = batch_invariant
        self._faults = frozenset(faults)
        self._graphs = graphs
        self.was_ahead = False
        """Whether the latest pass was decoded ahead: only the bookkeeping has changed."""

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        n_seqs: int,
        n_ctx: int,
        device: torch.device,
        *,
        policy: str = "checkpoint",
        n_rs_seq: int = 0,
        unified: bool = False,
        faults: Collection[str] = (),
        batch_invariant: bool = False,
        types: StateTypes | None = None,
    ) -> HybridMemory:
        """Memory for a model's trunk; policy is a key of POLICIES. types: None = all of f32."""
        layers: dict[CellKey, CellSize] = dict(config.cells().items())
        rotate = {
            layer: key_rotation(config.rope, size.first_turned)
            for layer, size in layers.items()
            if config.rope and size.first_turned is not None
        }
        attention = AttentionKV(
            layers,
            n_seqs,
            n_ctx,
            device,
            unified=unified,
            in_order=batch_invariant,
            rotate=rotate if config.rope and len(rotate) == len(layers) else None,
        )
        layout = layout_of(config)
        if layout and types:
            layout = stored_as(layout, types.s, types.r, types.gates)
        return cls(
            attention,
            POLICIES[policy](layout, n_seqs, n_rs_seq, device, faults) if layout else None,
            faults,
            batch_invariant=batch_invariant,
            graphs=graphs_for(device),
        )

    @classmethod
    def for_layers(
        cls,
        layers: Mapping[int, CellSize],
        n_seqs: int,
        n_ctx: int,
        device: torch.device,
        *,
        ahead: bool = False,
        batch_invariant: bool = False,
    ) -> HybridMemory:
        """Memory for attention layers alone, as drafters have them; ModelConfig.mtp_cells gives
        those of an MTP block. ahead: see AttentionKV."""
        cells: dict[CellKey, CellSize] = dict(layers.items())
        attention = AttentionKV(cells, n_seqs, n_ctx, device, in_order=batch_invariant, ahead=ahead)
        return cls(attention, None, batch_invariant=batch_invariant, graphs=graphs_for(device))

    def split(self, spans: Sequence[Span], n_ubatch: int, mode: str) -> list[UBatch]:
        """Split a batch into ubatches. `equal` keeps as many tokens together as a rollback needs; a
        pool of attention cells alone needs no rectangles for short batches (as in llama.cpp)."""
        if mode == "seq":
            return split_seq(spans, n_ubatch)
        elif self.is_pool and max([len(span.tokens) for span in spans]) <= _SHORT:
            return split_simple(spans, n_ubatch)
        else:
            recurrent = self.recurrent
            keep = recurrent.n_rs_seq + 1 if recurrent and not recurrent.accumulates else 0
            return split_equal(spans, n_ubatch, keep=keep)

    @property
    def is_pool(self) -> bool:
        """Whether sequences of different lengths can share a ubatch: attention cells only,
        unified."""
        return self.recurrent is None and self.attention.unified

    def prepare(self, ubatches: Sequence[UBatch]) -> bool:
        """Whether the ubatches could be decoded in turn; changes nothing."""
        if self.recurrent and not self.recurrent.prepare(ubatches):
            return False
        return self.attention.prepare(ubatches)

    def takes_parts(self, n_tokens: int) -> bool:
        """Whether a ubatch of one sequence and this many tokens may be computed in parts."""
        return self.recurrent is None and self._by_index(n_tokens)

    @property
    def records_launches(self) -> bool:
        """Whether recordings consist of launches of compiled kernels, and may contain no torch
        operation."""
        return self.attention.device.type == "cpu" and uses_llvm()

    def part(self, first: int, n: int) -> None:
        """Restrict layers to tokens first .. first + n - 1 of the current ubatch (see
        `takes_parts`). Cells of later tokens exist but are masked."""
        self.attention.part(first, n)

    def begin(self, ubatch: UBatch) -> UBatchTensors:
        """Prepare one forward pass; returns the ubatch's arrays on the device, which the next pass
        may overwrite. ContextFullError changes nothing."""
        by_index = self._by_index(ubatch.tokens.size)
        self.was_ahead = is_decoded = self.is_ahead
        there = self.attention.begin(ubatch, by_index=by_index, is_decoded=is_decoded)
        if self.recurrent:
            self.recurrent.begin(ubatch, by_index=by_index, is_decoded=is_decoded)
        return there

    def inputs(self, seqs: Sequence[int]) -> list[dict[StateKey, Tensor]]:
        """States that a pass with one token of each of these sequences would start from
        (SnapshotPolicy.inputs). Not for a memory without recurrent states."""
        assert self.recurrent is not None
        return self.recurrent.inputs(seqs, by_index=self._by_index(len(seqs)))

    def _by_index(self, n_tokens: int) -> bool:
        """Whether a pass of this many tokens takes cell and row numbers from the device."""
        return self._graphs is not None and self._graphs.takes(n_tokens)

    @property
    def is_ahead(self) -> bool:
        """Whether the next pass, of the most probable token of the latest logits, has already been
        decoded; the bookkeeping is still that of the latest pass."""
        return self._graphs is not None and self._graphs.is_ahead

    def run(
        self,
        key: Hashable,
        arguments: tuple[Tensor, ...],
        compute: Callable[..., tuple[Tensor, ...]],
        ahead: GreedyTokens | None = None,
        *,
        keeps: bool = True,
    ) -> tuple[Tensor, ...]:
        """Run compute(*arguments), or replay the recording of an equal pass.

        key: everything that the computation depends on, except this memory and the shapes of the
        arguments. ahead: given if the pass ends with the record of one row and more passes may be
        decoded at once. keeps: whether the results must stay valid when the next pass starts.
        """
        if self._graphs is None:
            return compute(*arguments)
        if self._graphs.is_ahead:
            return self._graphs.next_ahead()
        cells = self.attention.pass_inputs()
        states = self.recurrent.pass_inputs() if self.recurrent else PassInputs(None)
        if cells is None or states is None:
            return compute(*arguments)
        pass_inputs = PassInputs((key, cells.key, states.key), cells.inputs + states.inputs)
        decode_on = self._decode_on(ahead) if ahead and self.records_launches else None
        return self._graphs.run(pass_inputs, arguments, compute, decode_on, keeps=keeps)

    def _decode_on(self, ahead: GreedyTokens) -> DecodeOn | None:
        """How to decode on from the current pass, None where this needs the host."""
        place = self.attention.token_place(ahead[0])
        if place is None or (self.recurrent and not self.recurrent.repeats()):
            return None
        return lambda table, outputs: decode_on(table, outputs, place, *ahead)

    def commit(self) -> None:
        """Finish the forward pass that `begin` prepared. Raises ModelFileError if a mapped weight
        file was truncated meanwhile."""
        check_mapped()
        if self.recurrent:
            self.recurrent.commit()

    def seq_rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        """Remove positions p0 <= pos < p1. A refusal changes neither part."""
        if self.recurrent and not self.recurrent.seq_rm(seq, p0, p1):
            return False
        return self.attention.seq_rm(seq, p0, p1)

    def seq_cp(self, src: int, dst: int) -> None:
        """dst becomes a copy of src."""
        if self.recurrent:
            self.recurrent.seq_cp(src, dst)
        self.attention.seq_cp(src, dst)

    def fork(self, src: int, dst: int) -> None:
        """Make dst a copy of src with a recurrent state in cells of its own, so that a pass of both
        can be recorded like any other. Snapshots are not copied."""
        if self.recurrent:
            self.recurrent.fork(src, dst)
        self.attention.seq_cp(src, dst)

    def seq_keep(self, seq: int) -> None:
        """Remove every other sequence."""
        if self.recurrent:
            self.recurrent.seq_keep(seq)
        self.attention.seq_keep(seq)

    def seq_add(self, seq: int, p0: int, p1: int, shift: int) -> None:
        """Shift positions p0 <= pos < p1; keys are rotated with them. Raises as AttentionKV's."""
        self.attention.seq_add(seq, p0, p1, shift)
        if self.recurrent:
            self.recurrent.seq_add(seq, p0, p1, shift)

    def clear(self, seq: int) -> None:
        """Remove a sequence."""
        self.seq_rm(seq, 0)

    def seq_pos_max(self, seq: int) -> int:
        """Last position that both parts hold."""
        pos = self.attention.seq_pos_max(seq)
        return min(pos, self.recurrent.seq_pos_max(seq)) if self.recurrent else pos

    def save(
        self, seq: int, device: torch.device | None = None, *, full: bool = False
    ) -> SequenceCheckpoint:
        """Copy the part that cannot be truncated to `device` (None: where it is), or everything."""
        return SequenceCheckpoint(
            self.seq_pos_max(seq),
            self.recurrent.save(seq, device) if self.recurrent else None,
            self.attention.state(seq) if full else None,
        )

    def restore(self, seq: int, checkpoint: SequenceCheckpoint) -> None:
        """Restore a checkpoint. Attention cells above it are removed (llama.cpp #19493)."""
        if self.recurrent and checkpoint.recurrent:
            self.recurrent.restore(seq, checkpoint.recurrent)
        if checkpoint.attention is not None:
            self.attention.put(seq, checkpoint.attention)
        elif "keep-stale-kv" not in self._faults:
            self.attention.seq_rm(seq, checkpoint.pos_max + 1)

    def state(self, seq: int) -> SequenceCheckpoint:
        """The full state of a sequence, also while a rollback is pending."""
        return self.save(seq, torch.device("cpu"), full=True)

    def put(self, seq: int, state: SequenceCheckpoint) -> None:
        """Replace a sequence by a full checkpoint.

        Raises OptionError for the state of another model, ContextFullError if it has too many
        cells; both change nothing.
        """
        recurrent = state.recurrent
        wanted = self.recurrent.layout if self.recurrent else None
        if (wanted is None) != (recurrent is None) or (
            wanted and recurrent and not wanted.fits(recurrent.states)
        ):
            raise OptionError(
                "The saved sequence belongs to a model with other recurrent layers.",
                "Load a sequence that was saved with this model.",
            )
        self.attention.put(seq, state.cells)
        if self.recurrent and recurrent:
            self.recurrent.restore(seq, recurrent)

    def mirror(self, seq: int, source: HybridMemory, p0: int) -> None:
        """Copy a sequence from `source`, a memory of the same model.

        Attention cells are copied from position p0 on; below it both must be equal already. Raises
        ContextFullError, which changes nothing.
        """
        self.attention.put(seq, source.attention.state(seq, p0), p0)
        if self.recurrent and source.recurrent:
            pos = source.recurrent.seq_pos_max(seq)
            self.recurrent.put(seq, pos, source.recurrent.live(seq))

    @property
    def is_recorded(self) -> bool:
        """Whether there are recorded passes, which are bound to this memory."""
        return self._graphs is not None and not self._graphs.is_empty

    def renew(self) -> bool:
        """Reset to the initial state in the same storage, so that recorded passes stay valid.

        Returns False if storage has grown too much for that; the memory is then useless.
        """
        if not self.attention.renew():
            return False
        if self.recurrent:
            self.recurrent.renew()
        return True

    def poison(self, value: float) -> None:
        """Fill all storage, before anything is decoded, so that reads of uninitialised memory
        show."""
        self.attention.poison(value)
        if self.recurrent:
            self.recurrent.poison(value)

    def n_bytes(self) -> int:
        """Bytes of storage held."""
        return self.attention.n_bytes() + (self.recurrent.n_bytes() if self.recurrent else 0)

    def n_held_bytes(self) -> int:
        """Bytes of storage, including what is kept for recorded passes only."""
        recurrent = self.recurrent.n_bytes() if self.recurrent else 0
        recorded = self._graphs.n_bytes if self._graphs else 0
        return self.attention.n_held_bytes() + recurrent + recorded

    def snapshot_bytes(self) -> int:
        """Bytes of recurrent storage beyond one live state per sequence."""
        recurrent = self.recurrent
        return recurrent.n_bytes() - recurrent.n_seqs * recurrent.layout.n_bytes if recurrent else 0


MakeMemory = Callable[[], HybridMemory]

MOST_MEMORIES = 32
MOST_BYTES = 256 << 20
"""Limit for all memories on a shelf, recordings included."""


class MemoryShelf:
    """Unused memories, by keys that are equal where one can replace the other.

    The oldest are dropped above MOST_MEMORIES or MOST_BYTES. Thread-safe.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Hashable, HybridMemory]] = []
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, key: Hashable, make: MakeMemory) -> HybridMemory:
        """The newest memory under the key, or one made by `make`; it belongs to the caller
        alone."""
        with self._lock:
            places = [i for i, (its_key, _) in enumerate(self._kept) if its_key == key]
            memory = self._kept.pop(places[-1])[1] if places else None
        return memory if memory and memory.renew() else make()

    def put(self, key: Hashable, memory: HybridMemory) -> None:
        """Keep an unused memory if a later run would benefit from it."""
        if not memory.is_recorded:
            return
        with self._lock:
            self._kept.append((key, memory))
            while len(self._kept) > MOST_MEMORIES or self._n_bytes() > MOST_BYTES:
                del self._kept[0]

    def _n_bytes(self) -> int:
        return sum(memory.n_held_bytes() for _, memory in self._kept)


class LentMemories:
    """Memories that one run takes from a shelf, or makes for itself without one."""

    def __init__(self, shelf: MemoryShelf | None = None) -> None:
        self._shelf = shelf
        self._lent: list[tuple[Hashable, HybridMemory]] = []

    def take(self, key: Hashable, make: MakeMemory) -> HybridMemory:
        """See MemoryShelf."""
        if self._shelf is None:
            return make()
        memory = self._shelf.take(key, make)
        self._lent.append((key, memory))
        return memory

    def give_back(self) -> None:
        """Return the memories at the end of a run without errors."""
        if self._shelf is not None:
            for key, memory in self._lent:
                self._shelf.put(key, memory)
        self._lent = []
