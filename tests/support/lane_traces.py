"""Comparisons made by hand: lanes as runs of a trace, with errors that a test chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.trace.store import TraceStore

FIRST_POS = 10
PIECES = ("def", " f", "(", "x", "):", "\n", " return", " y")
LAYERS = (0, 2, 5)
ROUNDS = ((0, 1), (1, 3), (2, 3), (3, 1))
"""Round and how many tokens it chose: positions 10, 11-13, 14-16, 17."""
N = sum(n for _, n in ROUNDS)
PATHS = {"checkpoint": "restore", "planes": "seq_rm", "ring": "seq_rm"}

Tops = Mapping[int, Sequence[tuple[int, float]]]


class LaneBuilder:
    """A reference lane at first; `lane` adds the others."""

    def __init__(self, store: TraceStore | None = None) -> None:
        self.store = TraceStore() if store is None else store
        self.store.pieces.update({i: piece.encode() for i, piece in enumerate(PIECES)})
        self.reference = self.store.begin_run(
            {"lane": "reference", "lane_kind": "reference", "options": {"n_predict": N}}
        )
        for number, positions in self._rounds():
            self._round(self.reference, number, positions, "none", None)

    def lane(
        self,
        name: str,
        nmse: Sequence[float],
        *,
        states: Sequence[float] = (),
        tops: Tops | None = None,
        record: bool = True,
    ) -> int:
        """A lane with these errors, one for each position; fewer end it early.

        max |Δ| is twice the NMSE, KL three times. states: error of S after each round, of layer
        0; the others have half of it, conv windows a tenth. tops: most probable tokens of
        positions, others have those of the reference. record: whether tokens are recorded.
        """
        kinds = {"noise": "noise", "peer": "peer", "noise,peer=1": "peer noise"}
        kind = kinds.get(name, "noise" if name.startswith("noise") else "policy")
        run_id = self.store.begin_run(
            {
                "lane": name,
                "lane_kind": kind,
                "lane_against": self.reference,
                "options": {"n_predict": N},
            }
        )
        for number, positions in self._rounds():
            kept = [pos for pos in positions if pos - FIRST_POS < len(nmse)]
            if not kept:
                break
            state = states[number] if number < len(states) else None
            path = PATHS.get(name.partition(",")[0], "none") if number in (1, 2) else "none"
            if record:
                self._round(run_id, number, kept, path, tops)
            for pos in kept:
                error = nmse[pos - FIRST_POS]
                last = pos == kept[-1] and state is not None
                self.store.divergence.append(
                    run_id=run_id,
                    lane=name,
                    round=number,
                    seq_id=0,
                    pos=pos,
                    token_id=pos - FIRST_POS,
                    nmse=error,
                    max_abs=2 * error,
                    kl=3 * error,
                    top1_equal=int(not error > 0.1),
                    rank=2 if error > 0.1 else 1,
                    top2_gap=0.5,
                    state_error=state if last else None,
                    conv_error=state / 10 if last and state is not None else None,
                    cells_differ=0 if last else None,
                )
            for layer in LAYERS if state is not None else ():
                assert state is not None
                error = state if layer == 0 else state / 2
                self.store.states.append(
                    run_id=run_id,
                    lane=name,
                    round=number,
                    seq_id=0,
                    pos=kept[-1] - 1,
                    layer=layer,
                    state_error=error,
                    conv_error=error / 10,
                )
        return run_id

    def row(self, run_id: int, name: str, index: int, nmse: float) -> None:
        """One more position of a lane, a round of its own."""
        self.store.divergence.append(
            run_id=run_id,
            lane=name,
            round=index,
            seq_id=0,
            pos=FIRST_POS + index,
            token_id=index % len(PIECES),
            nmse=nmse,
            max_abs=nmse,
            kl=nmse,
            top1_equal=1,
            rank=1,
        )

    def end(self) -> None:
        """Close the runs, as a comparison does."""
        for facts in self.store.runs.values():
            facts["stops"] = ["limit"]

    def _rounds(self) -> list[tuple[int, list[int]]]:
        found, pos = [], FIRST_POS
        for number, n in ROUNDS:
            found.append((number, list(range(pos, pos + n))))
            pos += n
        return found

    def _round(
        self, run_id: int, number: int, positions: list[int], path: str, tops: Tops | None
    ) -> None:
        for pos in positions:
            chosen = pos - FIRST_POS
            likely = (tops or {}).get(pos, [(chosen, 0.5), ((chosen + 1) % len(PIECES), 0.25)])
            self.store.tokens.append(
                run_id=run_id,
                round=number,
                seq_id=0,
                pos=pos,
                kind="target",
                token_id=chosen,
                target_top_id=[token for token, _ in likely],
                target_top_p=[p for _, p in likely],
            )
        self.store.rounds.append(
            run_id=run_id,
            round=number,
            seq_id=0,
            pos0=positions[0] - 1,
            num_emitted=len(positions),
            rollback_path=path,
            num_draft_tokens=len(positions),
            num_accepted_draft_tokens=len(positions) - 1,
            stop_kind="target",
            verify_width=1,
            rollback_depth=0 if path == "none" else 1,
            kv_cells_duplicate=0,
        )


NOISE = [0.0, 1e-12, 2e-12, 1e-12, 1e-12, 4e-12, 1e-12, 1e-12]
CLEAN = [0.0, 2e-12, 1e-12, 2e-12, 2e-12, 1e-12, 3e-12, 1e-12]
FAULTY = [0.0, 1e-12, 2e-12, 1e-12, 1e-3, 0.25, 1e-12, 4e-3]
"""Beyond the bound of 1e-9 at positions 14, 15 and 17, chosen in rounds 2 and 3."""


def faulty_comparison() -> LaneBuilder:
    """Reference 0, noise 1, checkpoint 2 and a ring 3 that goes wrong in round 2."""
    builder = LaneBuilder()
    builder.lane("noise", NOISE)
    builder.lane("checkpoint", CLEAN, states=[0.0, 1e-7, 1e-7, 1e-7])
    builder.lane(
        "ring,fault=no-conv-rollback",
        FAULTY,
        states=[0.0, 1e-2, 1.0, 1e-4],
        tops={15: [(7, 0.46), (5, 0.22), (6, 0.1)]},
    )
    builder.end()
    return builder
