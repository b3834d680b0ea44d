"""What llama-server reported of the bundled model, and runs written of it by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.trace.facts import SourceFacts
from engine.trace.records import EMITTED_KINDS
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter

CAPTURED_TARGET = Path(__file__).parents[1] / "data" / "captures" / "captured-target.gguf"
"""The model of the captures: an earlier bundled one, all of whose weights were others."""

PROMPT = "def quicksort(arr):"
N_PROMPT = 10
GREEDY: tuple[tuple[int, int, tuple[int, ...]], ...] = (
    (0, 0, (220,)),
    (3, 1, (310, 3796)),
    (3, 2, (25, 220, 18)),
    (3, 0, (15,)),
    (3, 1, (15, 16)),
    (3, 0, (198,)),
    (3, 1, (258, 367)),
    (3, 0, (2882,)),
    (3, 0, (296,)),
    (3, 3, (220, 796, 338, 82)),
    (3, 1, (358, 220)),
    (3, 0, (18,)),
    (3, 3, (15, 15, 16, 198)),
    (3, 1, (258, 467)),
    (3, 2, (258, 308, 372)),
    (3, 0, (364,)),
    (3, 1, (373, 62)),
    (3, 0, (2074,)),
    (3, 0, (273,)),
    (3, 1, (259, 334)),
)
"""Drafted, accepted and emitted in each round of llama-server 0c1e57098 on the bundled model with
draft-mtp at temperature 0; the first token comes from the prompt."""

META = {"n_vocab": 4096, "n_ctx_train": 2048, "n_embd": 256, "n_params": 8878384, "size": 9488320}
"""What its /v1/models says of the bundled model."""

Rounds = Sequence[tuple[int, int, Sequence[int]]]


def observed_run(
    rounds: Rounds = GREEDY,
    *,
    store: TraceStore | None = None,
    prompt: str = PROMPT,
    n_prompt: int = N_PROMPT,
    settings: Mapping[str, Any] | None = None,
    meta: Mapping[str, int] = META,
    texts: Mapping[int, str] | None = None,
    rejected: Mapping[int, int] | None = None,
) -> RunRef:
    """A run with one request. texts: by place in the output, of tokens whose ids were hidden.
    rejected: by round, the id of the first token that was refused."""
    store = store or TraceStore()
    request = {
        "path": "/completion",
        "prompt": prompt,
        "settings": {"temperature": 0} if settings is None else dict(settings),
        "seq_ids": [0],
    }
    writer = TraceWriter.begin(
        store,
        SourceFacts("llama-server", "b1-0c1e570"),
        {"model": {"name": "demo-target.gguf", "meta": dict(meta)}, "requests": [request]},
    )
    pos = n_prompt
    for number, (drafted, accepted, ids) in enumerate(rounds):
        for i, token in enumerate(ids):
            kind = "accepted" if i < accepted else ("replacement" if drafted else "target")
            place = pos - n_prompt
            hidden = {"text": texts[place]} if texts and place in texts else {"token_id": token}
            if i == accepted and rejected and number in rejected:
                writer.append(
                    "tokens",
                    round=number,
                    seq_id=0,
                    pos=pos,
                    kind="rejected",
                    token_id=rejected[number],
                )
            writer.append("tokens", round=number, seq_id=0, pos=pos, kind=kind, **hidden)
            pos += 1
        undone = drafted - accepted
        writer.append(
            "rounds",
            round=number,
            seq_id=0,
            t_ms=4.0 * number,
            pos0=pos - len(ids) - 1 if number else 0,
            num_draft_tokens=drafted if number else None,
            num_accepted_draft_tokens=accepted if number else None,
            num_emitted=len(ids),
            rollback_depth=undone,
            rollback_path="seq_rm" if undone else "none",
            verify_width=drafted + 1 if number else n_prompt,
        )
    writer.end(["limit"])
    return RunRef(store, writer.run_id)


def emitted_ids(rounds: Rounds = GREEDY) -> list[int]:
    """The output of these rounds."""
    return [token for _, _, ids in rounds for token in ids]


def with_token(rounds: Rounds, place: int, token: int) -> list[tuple[int, int, list[int]]]:
    """The same rounds with another token at a place of the output."""
    changed, n = [], 0
    for drafted, accepted, ids in rounds:
        own = [token if n + i == place else one for i, one in enumerate(ids)]
        changed.append((drafted, accepted, own))
        n += len(ids)
    return changed


def emitted_rows(run: RunRef) -> list[dict[str, Any]]:
    """The rows of the output's tokens."""
    tokens = run.store.tokens
    rows = map(tokens.row, range(len(tokens)))
    return [r for r in rows if r["run_id"] == run.run_id and r["kind"] in EMITTED_KINDS]
