"""A trace with times, widths, ubatches and cells: a plain run, and a drafted one."""

from __future__ import annotations

import numpy as np

from engine.trace.store import TraceStore

K = 4
MODEL = {"name": "toy"}


def timed_trace(rounds: int = 100, n_seqs: int = 1) -> tuple[TraceStore, int, int]:
    """A store, the id of its plain run, and that of its drafted run, on the same prompt."""
    store = TraceStore()
    runs = [begin(store, types) for types in ((), ("draft-mtp",))]
    for run_id in runs:
        add_rounds(store, run_id, 0, rounds, n_seqs, drafts=run_id == runs[1])
    return store, runs[0], runs[1]


def begin(store: TraceStore, types: tuple[str, ...], prompt: tuple[int, ...] = (5, 6, 7)) -> int:
    """Register a run on a prompt of these tokens."""
    options = {"spec": {"types": list(types)}, "sampler": {"temp": 0.0}, "parallel": 1}
    run_id = store.begin_run({"options": options, "compute": "f32", "model": MODEL})
    for pos, token_id in enumerate(prompt):
        store.tokens.append(
            run_id=run_id, round=0, seq_id=0, pos=pos, kind="prompt", token_id=token_id
        )
    return run_id


def add_rounds(
    store: TraceStore, run_id: int, first: int, stop: int, n_seqs: int = 1, *, drafts: bool = True
) -> None:
    """Rounds first..stop, the prompt in round 0; many at a time, so that long traces are quick."""
    number = np.repeat(np.arange(first, stop), n_seqs)
    n = len(number)
    seq_id = np.tile(np.arange(n_seqs), stop - first)
    prompt = number == 0
    drafted = np.where(drafts & (number % 11 != 5), 1 + (number * 7 + seq_id) % K, 0)
    accepted = np.minimum(drafted, (number * 5 + seq_id * 3) % (K + 1))
    drafted = np.where(prompt, np.iinfo(np.int32).min, drafted)
    accepted = np.where(prompt, np.iinfo(np.int32).min, accepted)
    n_drafted = np.maximum(drafted, 0)
    width = np.where(prompt, 64, n_drafted + 1)
    path = np.where(n_drafted > np.maximum(accepted, 0), "seq_rm", "none")
    path = np.where((path == "seq_rm") & (number % 29 == 12), "restore", path)
    undone = path == "restore"
    phases = {
        "draft_ms": np.where(prompt, 3.0, 1.6 * n_drafted) + 0.2,
        "verify_ms": 6.0 + 0.9 * width,
        "sample_ms": 0.3 + 0.1 * width,
        "save_ms": np.where(n_drafted > 0, 0.4, 0.0),
        "rollback_ms": np.where(path == "seq_rm", 0.5, 0.0),
        "restore_ms": np.where(undone, 2.0, 0.0),
        "replay_ms": np.where(undone, 9.0, 0.0),
    }
    total = sum(phases.values())
    before = store.rounds.column("t_ms")[-1] if first else 0.0
    emitted = np.maximum(accepted, 0) + 1
    held = 64 + np.cumsum(emitted) // n_seqs
    store.rounds.extend(
        {
            "run_id": np.full(n, run_id),
            "round": number,
            "seq_id": seq_id,
            "t_ms": before + np.cumsum(total),
            "pos0": held,
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
            "num_emitted": emitted,
            "num_target_tokens": np.ones(n, int),
            "rollback_depth": n_drafted - np.maximum(accepted, 0),
            "rollback_path": path.tolist(),
            "n_rs_seq": np.full(n, K),
            "verify_width": width,
            "attention_pos_max": held,
            "kv_cells_used": held,
            "kv_cells_duplicate": np.where(number % 40 == 33, 3, 0),
            **phases,
        }
    )
    rounds = np.arange(first, stop)
    widest = width.reshape(-1, n_seqs).max(axis=1)
    padding = n_seqs * widest - width.reshape(-1, n_seqs).sum(axis=1)
    replays = rounds[undone.reshape(-1, n_seqs).any(axis=1)]
    purposes = np.where(rounds == 0, "prompt", "verify").tolist() + ["replay"] * len(replays)
    n_seq_tokens = np.concatenate([widest, np.full(len(replays), 2)])
    every = np.concatenate([rounds, replays])
    order = np.argsort(every, kind="stable")
    store.ubatches.extend(
        {
            "run_id": np.full(len(every), run_id),
            "round": every[order],
            "ubatch": np.arange(len(every)),
            "n_seqs": np.where(order < len(rounds), n_seqs, 1),
            "n_seq_tokens": n_seq_tokens[order],
            "seq_ids": ["0"] * len(every),
            "n_padding": np.concatenate([padding, np.zeros(len(replays), int)])[order],
            "purpose": [purposes[i] for i in order],
            "reason": ["end of batch"] * len(every),
            "ms": 6.0 + 0.9 * n_seq_tokens[order],
        }
    )
