"""A timed run of a drafter that tells how sure it is, and is right somewhat less often."""

from __future__ import annotations

import numpy as np

from engine.trace.records import MISSING, N_TOP
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore


def confident_trace(
    n_rounds: int,
    n_max: int = 4,
    p_min: float = 0.0,
    *,
    drafter: str = "draft-mtp",
    store: TraceStore | None = None,
) -> RunRef:
    """Every round drafts n_max tokens, after a prompt of 64; many rounds are quick to write."""
    store = TraceStore() if store is None else store
    spec = {"types": [drafter], "n_max": n_max, "n_min": 0, "p_min": p_min, "accept": "match"}
    options = {"spec": spec, "sampler": {"temp": 0.0}, "parallel": 1}
    run = RunRef(store, store.begin_run({"options": options, "stops": ["limit"]}))
    rng = np.random.default_rng(n_rounds)
    sure = p_min + (1 - p_min) * rng.beta(3, 1.5, (n_rounds, n_max))
    right = rng.random(sure.shape) < sure**1.3
    accepted = np.where(right.all(1), n_max, (~right).argmax(1))
    _tokens(run, sure, accepted, rng)
    drafted, width = np.full(n_rounds, n_max), np.full(n_rounds, n_max + 1)
    phases = {
        "draft_ms": 1.6 * drafted,
        "verify_ms": 6 + 0.9 * width,
        "sample_ms": 0.1 * width,
        "save_ms": np.zeros(n_rounds),
        "rollback_ms": np.where(accepted < drafted, 0.5, 0.0),
        "restore_ms": np.zeros(n_rounds),
        "replay_ms": np.zeros(n_rounds),
    }
    first = dict.fromkeys(phases, 0.0) | {"verify_ms": 20.0, "t_ms": 20.0}
    store.rounds.append(
        run_id=run.run_id, round=0, seq_id=0, num_emitted=1, verify_width=64, **first
    )
    store.rounds.extend(
        {
            "run_id": np.full(n_rounds, run.run_id),
            "round": np.arange(1, n_rounds + 1),
            "seq_id": np.zeros(n_rounds, int),
            "drafter": [drafter] * n_rounds,
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
            "num_emitted": accepted + 1,
            "verify_width": width,
            "rollback_depth": drafted - accepted,
            "t_ms": 20 + np.cumsum(sum(phases.values())),
            **phases,
        }
    )
    return run


def _tokens(run: RunRef, sure: np.ndarray, accepted: np.ndarray, rng: np.random.Generator) -> None:
    """The drafted tokens of each round, all of them the first of five candidates, and the target's
    own token after those accepted."""
    n, k = sure.shape
    index = np.arange(k)
    kinds = np.where(
        index < accepted[:, None],
        "accepted",
        np.where(index == accepted[:, None], "rejected", "ignored"),
    )
    kinds = np.c_[kinds, np.where(accepted == k, "bonus", "replacement")]
    begins = np.cumsum(np.r_[0, accepted[:-1] + 1])
    pos = 65 + begins[:, None] + np.c_[np.tile(index, (n, 1)), accepted]
    own = rng.choice([2, 3, 4, 5, 9], n, p=[0.5, 0.2, 0.1, 0.1, 0.1])
    is_drafted = np.tile(np.arange(k + 1) < k, n)
    run.store.tokens.extend(
        {
            "run_id": np.full(n * (k + 1), run.run_id),
            "round": np.repeat(np.arange(1, n + 1), k + 1),
            "seq_id": np.zeros(n * (k + 1), int),
            "pos": pos.ravel(),
            "kind": kinds.ravel().tolist(),
            "token_id": np.c_[np.ones((n, k), int), own].ravel(),
            "draft_index": np.where(is_drafted, np.tile(np.arange(k + 1), n), MISSING),
            "draft_p": np.c_[sure, np.full(n, np.nan)].ravel(),
            "draft_top_id": np.where(
                is_drafted[:, None], np.arange(1, N_TOP + 1)[None, :], MISSING
            ).astype(np.int32),
        }
    )
