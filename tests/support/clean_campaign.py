"""Random comparisons and audited runs without any bug, and how many of them are accused.

The suite plays a few; `python -m tests.support.clean_campaign N [--kind runs] [--seed S]` plays N
and prints everything that was accused. With --log FILE each one is noted there, a line of JSON;
those that the file has are not played again, so that a long campaign can be played in pieces of
--minutes. --only NUMBER plays a single one again. --rows FILE keeps the raw errors of comparisons,
for a look at their distribution.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from engine.analysis.findings.check import recorded
from engine.analysis.verdict import LaneVerdict
from engine.audit.run_audit import SHARE_OF_RUN, RunAudit
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.decode.held_sequences import PromptCache
from engine.errors import OptionError
from engine.options import (
    CHECKPOINT_DEVICES,
    REPLAY_MODES,
    ROLLBACK_POLICIES,
    SPLITS,
    CacheOptions,
    Prompt,
    RunOptions,
)
from engine.session import Session
from engine.trace.store import TraceStore
from tests.support import clean_settings
from tests.support.clean_settings import MODES, Drafted, opened, pick, prompt_for

TRUE = (
    "concurrency-lost",
    "drafter-mute",
    "n-min-never-met",
    "degenerate-repetition",
    "prompt-processed-again",
    "acceptance-zero",  # of a drafter with random weights
)
"""Findings above info that are true of settings and models that are played."""


@dataclass(slots=True)
class Played:
    """A comparison or a run. what: its settings in a line; accused: lanes beyond their bound,
    findings above info, an audit that differs; rows: raw errors of each lane of a comparison;
    facts: the audit of each run."""

    what: str
    accused: list[str] = field(default_factory=list)
    verdicts: list[LaneVerdict] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)

    def look(self, trace: TraceStore) -> None:
        """Add what the findings of a trace accuse."""
        self.accused += [
            f"{one.rule} ({trace.runs[one.run_id].get('lane', '')}): {one.message} {one.evidence}"
            for one in recorded(trace)
            if one.severity != "info" and one.rule not in TRUE
        ]


_IN_A_ROW = 5


def play(number: int, seed: int, kind: str, modes: Sequence[str] = MODES) -> Played:
    """The comparison or the run of this number, the same one for the same seed."""
    random = np.random.default_rng((seed, number, KINDS.index(kind)))
    pairs = [(name, mode) for name in clean_settings.models() for mode in modes]
    order = np.random.default_rng(seed).permutation(len(pairs))
    # a few in a row on one model, which is loaded once
    name, mode = pairs[order[number // _IN_A_ROW % len(pairs)]]
    while True:
        try:
            return _PLAYS[kind](random, name, mode)
        except OptionError:
            continue  # settings that exclude each other: the next ones


def _compared(random: np.random.Generator, name: str, mode: str) -> Played:
    """A comparison of random lanes over random prompts."""
    session, drafted, prompts, what = _drawn(random, name, mode)
    is_scripted = random.random() < 0.3
    options = replace(
        clean_settings.options(random, Drafted() if is_scripted else drafted),
        n_predict=int(random.integers(12, 31)),
        parallel=int(random.integers(1, len(prompts) + 1)),
    )
    texts = {_lane(random) for _ in range(2)}
    if not is_scripted:
        texts |= {f"{text},free" for text in [t for t in texts if "forks" not in t][:1]}
    lanes = [NOISE_LANE, *map(LaneSpec.parse, sorted(texts))]
    n_max = options.spec.n_max
    accept = tuple(random.integers(0, n_max + 1, 4).tolist()) if is_scripted else None
    comparison = Comparison(session, prompts, options, lanes, draft_accept=accept)
    while comparison.step():
        pass
    played = Played(f"{what} accept {accept} {_said(options)}", verdicts=comparison.results())
    rows = comparison.trace.divergence
    for v in played.verdicts:
        if v.is_beyond:
            bound = f"{v.worst_nmse:.2e} > {v.bound:.2e}"
            played.accused.append(f"{v.lane}: {v.verdict} {bound} {v.error}{v.fork or ''}")
        mine = rows.column("run_id") == v.run_id
        columns = ("nmse", "max_abs", "state_error", "top2_gap", "top1_equal", "kl", "round")
        played.rows.append((played.what, v.lane, *(rows.column(c)[mine].copy() for c in columns)))
    played.look(comparison.trace)
    return played


def _ran(random: np.random.Generator, name: str, mode: str) -> Played:
    """A run with its audit, whole or within a share of its time, perhaps one turn after another."""
    session, drafted, prompts, what = _drawn(random, name, mode)
    options = clean_settings.options(random, drafted)
    options = replace(
        options,
        parallel=int(random.integers(1, len(prompts) + 1)),
        rollback=str(pick(random, list(ROLLBACK_POLICIES))),
        n_rs_seq=pick(random, (None, None, None, 1, 2)),
        split=str(pick(random, SPLITS)),
        kv=str(pick(random, ("per-seq", "per-seq", "unified"))),
        n_ubatch=int(pick(random, (512, 512, 7, 3))),
        replay=str(pick(random, REPLAY_MODES)),
        checkpoint_device=str(pick(random, CHECKPOINT_DEVICES)),
        batch_invariant=bool(random.random() < 0.1),
    )
    longest = options.spec.longest
    if options.spec.accept == "match" and longest > 1 and random.random() < 0.15:
        length = 1.0 + longest * float(random.uniform(0.2, 0.8))
        options = replace(options, spec=replace(options.spec, synth_len=length))
    is_whole, has_turns = random.random() < 0.8, random.random() < 0.15
    played = Played(f"{what} whole {is_whole} turns {has_turns} {_said(options)}")
    cache = PromptCache(CacheOptions(checkpoint_min_step=5)) if has_turns else None
    given = prompts[:1] if has_turns else prompts
    if has_turns:
        options = replace(options, n_predict=12, parallel=1)
    for _ in range(3 if has_turns else 1):
        share = inf if is_whole else SHARE_OF_RUN
        audit = RunAudit(session, given, options, can_repeat=not has_turns, share=share)
        run = session.start(given, options, None, cache, audit=audit)
        while run.step():
            pass
        fact = run.trace.runs[run.run_id]["audit"]
        played.facts.append(fact)
        if fact["verdict"] == "differs" or any("failed" in one for one in fact["not_judged"]):
            played.accused.append(f"audit: {fact}")
        played.look(run.trace)
        (first, *_) = run.results()
        text = [*first.prompt_tokens, *first.tokens]
        # some turns go on where the last one ended, others go back first
        n_kept = len(text) - int(pick(random, (0, 0, 1, 5)))
        given = [Prompt((*text[: max(1, n_kept)], *given[0].tokens[:4]))]
    return played


def _drawn(
    random: np.random.Generator, name: str, mode: str
) -> tuple[Session, Drafted, list[Prompt], str]:
    drafted = pick(random, clean_settings.drafters_of(name))
    session = opened(name, mode, drafted.file)
    prompts = [prompt_for(session, name, random) for _ in range(int(pick(random, (1, 1, 2, 3))))]
    file = f" by {Path(drafted.file).stem}" if drafted.file else ""
    return session, drafted, prompts, f"{name} {mode} {len(prompts)} prompts{file}"


def _said(options: RunOptions) -> str:
    """What of the options is not as it would be without a word."""
    usual = RunOptions()
    changed = [
        f"{name}={getattr(options, name)}"
        for name in RunOptions.__dataclass_fields__
        if getattr(options, name) != getattr(usual, name)
        and name not in ("spec", "sampler", "state_types")
    ]
    spec, sampler, types = options.spec, options.sampler, options.state_types
    changed.append(f"drafters={','.join(spec.types)} n_max={spec.n_max} p_min={spec.p_min}")
    changed.append(f"accept={spec.accept} synth={spec.synth_len} temp={sampler.temp}")
    changed.append(f"grammar={sampler.has_grammar} states={types.s},{types.r},{types.gates}")
    changed.append(f"penalty={sampler.repeat_penalty}/{sampler.repeat_last_n}")
    return " ".join(changed)


def _lane(random: np.random.Generator) -> str:
    parts = [str(pick(random, list(ROLLBACK_POLICIES)))]
    for key, values in (
        ("n_rs_seq", (None, None, 1, 2)),
        ("split", (None, None, "seq")),
        ("kv", (None, None, "unified")),
        ("ubatch", (None, None, 3, 7)),
    ):
        value = pick(random, values)
        if value is not None:
            parts.append(f"{key}={value}")
    if random.random() < 0.25:
        parts.append("forks")
    return ",".join(parts)


_PLAYS = {"comparisons": _compared, "runs": _ran}
KINDS = tuple(_PLAYS)


def _noted(log: Path | None) -> list[dict[str, Any]]:
    if log is None or not log.exists():
        return []
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def _note(number: int, seed: int, kind: str, modes: Sequence[str]) -> tuple[dict[str, Any], Any]:
    """A line of the log, and the raw errors."""
    since, line = perf_counter(), {"kind": kind, "seed": seed, "number": number}
    try:
        played = play(number, seed, kind, modes)
    except Exception:  # a crash accuses as well
        return {**line, "accused": [traceback.format_exc()[-2000:]]}, []
    line |= {"what": played.what, "lanes": len(played.verdicts), "accused": played.accused}
    if played.facts:
        line["audits"] = dict(Counter(fact["verdict"] for fact in played.facts))
        line["not_judged"] = sorted({why for fact in played.facts for why in fact["not_judged"]})
        line["drafts"] = dict(
            Counter(one["what"] for fact in played.facts for one in fact["drafts"])
        )
    return {**line, "seconds": round(perf_counter() - since, 2)}, played.rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("n", type=int)
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", default=MODES)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--minutes", type=float, default=np.inf)
    parser.add_argument("--only", type=int)
    parser.add_argument("--rows")
    args = parser.parse_args()
    noted, kept, since = _noted(args.log), [], perf_counter()
    done = {n["number"] for n in noted if (n["kind"], n["seed"]) == (args.kind, args.seed)}
    numbers = [n for n in range(args.n) if n not in done] if args.only is None else [args.only]
    for number in numbers:
        if perf_counter() - since > 60 * args.minutes:
            break
        line, rows = _note(number, args.seed, args.kind, args.modes)
        kept += rows
        noted.append(line)
        for accused in line["accused"]:
            sys.stdout.write(f"{number}: {line.get('what', '')}: {accused}\n")
        if args.log is not None:
            with args.log.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
                out.flush()
                os.fsync(out.fileno())
    n_accused, n_lanes = (
        sum(bool(n["accused"]) for n in noted),
        sum(n.get("lanes", 0) for n in noted),
    )
    sys.stdout.write(f"{len(noted)} {args.kind}, {n_lanes} lanes, {n_accused} accused\n")
    if args.rows:
        np.save(args.rows, np.array(kept, object), allow_pickle=True)


if __name__ == "__main__":
    main()
