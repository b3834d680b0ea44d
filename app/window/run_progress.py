"""How far a run is, in words: tokens of those asked for, rounds, time and what is left of it."""

from __future__ import annotations

import math

from app.trace_models.live_numbers import LiveNumbers
from app.trace_models.run_rows import RunRows
from engine.analysis.audit_text import audit_goes_on
from engine.trace.run_ref import RunRef

_LEAST_S = 2.0
"""Before a run has gone on for so long nothing can be said of its end."""


def progress_text(run: RunRef, numbers: LiveNumbers) -> str:
    """ "1,238 / 2,000 tokens · round 339 · 44 s · about 27 s left"; what is not known is left out.

    numbers: figures of the run. The time is that of its rounds, without pauses; what is left is
    what the tokens still to come take at the speed so far. A text may end before its limit.
    """
    if numbers.tokens is None:
        return ""
    wanted = tokens_asked(run)
    of = f" / {wanted:,}" if wanted else ""
    parts = [f"{numbers.tokens:,}{of} tokens"]
    if numbers.rounds:
        parts.append(f"round {numbers.rounds - 1:,}")
    seconds = _seconds(run)
    if seconds is not None:
        parts.append(duration_text(seconds))
        speed = numbers.tokens_per_second or (numbers.tokens / seconds if seconds else 0.0)
        goes_on = not run.ended and not audit_goes_on(run.facts)
        if wanted and speed and seconds >= _LEAST_S and goes_on:
            left = max(wanted - numbers.tokens, 0) / speed
            parts.append(f"about {duration_text(left)} left")
    if audit_goes_on(run.facts):
        parts.append("compared with plain decoding; Stop ends that")
    return " · ".join(parts)


def tokens_asked(run: RunRef) -> int | None:
    """Tokens that all sequences of a run may generate, None without a limit or where not known."""
    options = run.facts.get("options")
    limit = options.get("n_predict") if isinstance(options, dict) else None
    if not isinstance(limit, int) or limit <= 0:
        return None
    table = run.store.tokens
    n = len(table)
    mine = table.column("run_id", 0, n) == run.run_id
    seqs = set(table.column("seq_id", 0, n)[mine].tolist())
    return limit * len(seqs) if seqs else None


def duration_text(seconds: float) -> str:
    """Seconds in whole units: 44 s, 3 min 20 s, 2 h 5 min."""
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _seconds(run: RunRef) -> float | None:
    rows = RunRows(run, "rounds")
    start, stop = rows.read()
    if start == stop:
        return None
    ms = rows.column("t_ms", stop - 1, stop)[0]
    return None if math.isnan(ms) else float(ms) / 1e3
