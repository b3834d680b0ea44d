"""Traces made by hand: what an engine would have recorded, without an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore

PLANES = 3


class TraceBuilder:
    """Writes rounds into a TraceStore; token texts are pieces, ids are given on first sight."""

    def __init__(self, store: TraceStore | None = None) -> None:
        self.store = TraceStore() if store is None else store
        self.run_id = self.store.begin_run({})
        self._ids = {piece: token_id for token_id, piece in self.store.pieces.items()}
        self._next_pos: dict[int, int] = {}
        self._next_round: dict[int, int] = {}

    @property
    def run(self) -> RunRef:
        """The run that is written."""
        return RunRef(self.store, self.run_id)

    def prompt(self, pieces: Iterable[str | bytes], seq_id: int = 0) -> None:
        """Round 0: the prompt of one sequence."""
        for piece in pieces:
            self._token("prompt", piece, seq_id, 0)
        self._next_round[seq_id] = 1

    def plain(self, piece: str | bytes, seq_id: int = 0) -> int:
        """A round without a draft."""
        number = self._begin(seq_id)
        self._token("target", piece, seq_id, number, target_p=0.9, target_rank=1)
        self._end(seq_id, number, drafted=0, accepted=0, stop="target", path="none")
        return number

    def untold(self, text: str, seq_id: int = 0) -> int:
        """A token of another engine that reported neither its id nor how its round went."""
        number, pos = self._begin(seq_id), self._next_pos.get(seq_id, 0)
        self._next_pos[seq_id] = pos + 1
        ids = {"run_id": self.run_id, "round": number, "seq_id": seq_id}
        self.store.tokens.append(**ids, pos=pos, kind="unknown", text=text)
        self.store.rounds.append(**ids, num_draft_tokens=3, num_emitted=1, total_ms=2.0)
        return number

    def draft(
        self,
        accepted: Sequence[str | bytes],
        last: str | bytes,
        rejected: Sequence[str | bytes] = (),
        seq_id: int = 0,
        path: str = "",
    ) -> int:
        """A round with a draft: accepted pieces, then rejected and ignored ones, then `last`.

        With path "restore" the accepted tokens are recorded as replayed too.
        """
        number = self._begin(seq_id)
        for i, piece in enumerate(accepted):
            self._token(
                "accepted",
                piece,
                seq_id,
                number,
                draft_index=i,
                draft_p=0.8,
                target_p=0.9,
                target_rank=1,
                target_entropy=0.4,
            )
        after = self._next_pos.get(seq_id, 0)
        for i, piece in enumerate(rejected):
            self._token(
                "ignored" if i else "rejected",
                piece,
                seq_id,
                number,
                pos=after + i,
                draft_index=len(accepted) + i,
                draft_p=0.44,
                target_p=None if i else 0.33,
                target_rank=None if i else 2,
            )
        kind = "replacement" if rejected else "bonus"
        self._token(kind, last, seq_id, number, target_p=0.38, target_rank=1)
        path = path or ("seq_rm" if rejected else "none")
        if path.startswith("restore"):
            for i, piece in enumerate(accepted):
                self._token("replayed", piece, seq_id, number, pos=after - len(accepted) + i)
        self._end(
            seq_id,
            number,
            drafted=len(accepted) + len(rejected),
            accepted=len(accepted),
            stop=kind,
            path=path,
        )
        return number

    def slots(self, states: Sequence[str], number: int, seq_id: int = 0) -> None:
        """The snapshot slots of a sequence after a round."""
        for slot, state in enumerate(states):
            self.store.memory.append(
                run_id=self.run_id, round=number, seq_id=seq_id, slot=slot, state=state, age=slot
            )

    def _begin(self, seq_id: int) -> int:
        number = self._next_round.get(seq_id, 0)
        self._next_round[seq_id] = number + 1
        return number

    def _token(
        self,
        kind: str,
        piece: str | bytes,
        seq_id: int,
        number: int,
        pos: int | None = None,
        **values: float | None,
    ) -> None:
        raw = piece.encode() if isinstance(piece, str) else piece
        token_id = self._ids.setdefault(raw, len(self.store.pieces))
        self.store.pieces[token_id] = raw
        if pos is None:
            pos = self._next_pos.get(seq_id, 0)
            self._next_pos[seq_id] = pos + 1
        self.store.tokens.append(
            run_id=self.run_id,
            round=number,
            seq_id=seq_id,
            pos=pos,
            kind=kind,
            token_id=token_id,
            **values,
        )

    def _end(
        self, seq_id: int, number: int, *, drafted: int, accepted: int, stop: str, path: str
    ) -> None:
        self.store.rounds.append(
            run_id=self.run_id,
            round=number,
            seq_id=seq_id,
            num_draft_tokens=drafted,
            num_accepted_draft_tokens=accepted,
            num_emitted=accepted + 1,
            stop_kind=stop,
            rollback_depth=drafted - accepted,
            rollback_path=path,
            n_rs_seq=PLANES,
            pos0=self._next_pos[seq_id] - accepted - 1,
        )


CODE = (
    "def quicksort(arr):\n    if len(arr) <= 1:\n        return arr\n"
    "    pivot = arr[len(arr) // 2]\n\tleft = [x for x in arr if x < pivot]\n"
    "    return quicksort(left) + middle\n"
)


def pieces_of(text: str) -> list[str]:
    """A text in token-like pieces: a word with the space before it, a line feed with indents."""
    pieces = [""]
    for char in text:
        joins = char.isalnum() and (pieces[-1][-1:].isalnum() or pieces[-1] == " ")
        joins = joins or (char == " " and pieces[-1][:1] in ("\n", " "))
        if joins:
            pieces[-1] += char
        else:
            pieces.append(char)
    return pieces[1:]


def sample_trace(text: str = CODE, rounds: int = 60, n_seqs: int = 1) -> TraceBuilder:
    """A run over a text that is drafted in threes, with every kind of token and every path."""
    builder = TraceBuilder()
    pieces = pieces_of(text)
    cursors = dict.fromkeys(range(n_seqs), 6)
    for seq_id in range(n_seqs):
        builder.prompt(pieces[:6], seq_id)

    def take(seq_id: int, n: int) -> list[str]:
        at = cursors[seq_id]
        cursors[seq_id] += n
        return [pieces[(at + i) % len(pieces)] for i in range(n)]

    for i in range(rounds):
        for seq_id in range(n_seqs):
            accepted = (i * 7 + seq_id * 3) % 4
            if i % 11 == 5:
                number = builder.plain(take(seq_id, 1)[0], seq_id)
            elif accepted == PLANES:
                number = builder.draft(take(seq_id, PLANES), take(seq_id, 1)[0], seq_id=seq_id)
            else:
                right = take(seq_id, accepted)
                wrong = [" value", "(", "\n    "][: PLANES - accepted]
                path = "refused" if i % 29 == 12 else "restore" if i % 13 == 4 else "seq_rm"
                number = builder.draft(right, take(seq_id, 1)[0], wrong, seq_id, path)
            builder.slots(_slot_states(i, accepted), number, seq_id)
    return builder


def repeated(builder: TraceBuilder, times: int) -> TraceBuilder:
    """The tokens of a one-sequence run as often as asked for, rounds and positions going on."""
    table = builder.store.tokens
    names = ("run_id", "round", "seq_id", "pos", "token_id")
    columns = {name: table.column(name).copy() for name in names}
    kinds = table.texts("kind")
    n_rounds, n_pos = int(columns["round"].max()) + 1, int(columns["pos"].max()) + 1
    for _ in range(times - 1):
        columns["round"] = columns["round"] + n_rounds
        columns["pos"] = columns["pos"] + n_pos
        table.extend({**columns, "kind": kinds})
    return builder


def _slot_states(i: int, accepted: int) -> list[str]:
    states = ["live", "fresh", "carried", "free"]
    if accepted < PLANES:
        states[PLANES - accepted] = "pending"
    if i % 13 == 4:
        states[-1] = "stale"
    return states
