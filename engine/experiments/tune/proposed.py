"""Proposals: which longest drafts are worth measuring on a server, from the rounds of one recorded
run and the speeds measured so far."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from engine.analysis.what_if.recorded import RecordedRounds
from engine.analysis.what_if.rules import FIXED
from engine.analysis.what_if.simulation import simulate
from engine.trace.facts import SourceFacts
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter

ServerRounds = Sequence[Sequence[tuple[int, int]]]
"""By answer, tokens drafted and accepted in each round."""
_FEW = 24
"""Drafts below which a run says too little."""


def recorded(answers: ServerRounds, *, is_synthetic: bool) -> RecordedRounds | None:
    """The rounds of a run as the simulator takes them; None where they are too few."""
    if sum(drafted > 0 for rounds in answers for drafted, _ in rounds) < _FEW:
        return None
    store = TraceStore()
    writer = TraceWriter.begin(store, SourceFacts("server", ""), {"synthetic": is_synthetic})
    number = 0
    for seq_id, rounds in enumerate(answers):
        writer.append("rounds", round=number, seq_id=seq_id, num_emitted=1)
        for drafted, accepted in rounds:
            number += 1
            writer.append(
                "rounds",
                round=number,
                seq_id=seq_id,
                num_draft_tokens=drafted,
                num_accepted_draft_tokens=accepted,
                num_emitted=accepted + 1,
                verify_width=drafted + 1,
            )
        number += 1
    writer.end(["end"] * len(answers))
    return RecordedRounds.of(RunRef(store, writer.run_id))


def at_best(
    rounds: RecordedRounds, measured: Mapping[int, float], lengths: Iterable[int]
) -> dict[int, float]:
    """Tokens per second that each n_max can have at most. measured: speeds known, by n_max, 0 for
    plain decoding. What a round costs follows from them by the width of its verification; where it
    was not measured it costs no less than the nearest narrower one: kernels for few rows end at
    some width (8 with llama.cpp's MMVQ), so between two measured ones it may jump anywhere."""
    wanted = sorted({*lengths, *measured})
    played = simulate(rounds, None, FIXED, [{"n_max": n} for n in wanted])
    per_round = dict(zip(wanted, played.tokens_per_round().tolist(), strict=True))
    found, least_ms = {}, 0.0
    for n in wanted:
        if speed := measured.get(n):
            least_ms = max(least_ms, 1e3 * per_round[n] / speed)
        found[n] = measured.get(n) or (1e3 * per_round[n] / least_ms if least_ms else math.inf)
    return found
