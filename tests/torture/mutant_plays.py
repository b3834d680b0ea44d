"""Plays: small pieces of work in which a bug of the engine shows, each named by a line of text.

`lane SETTING` compares a lane of one sequence with plain decoding, `lane3 SETTING` one of three,
`slots SETTING` one of four prompts in two slots. `run POLICY` decodes with an MTP head, `uneven`
three sequences with drafts of different lengths, `tree` with trees of drafts, `queue` four prompts
in two slots, `lookup` two with an n-gram drafter, `draft-simple` with a draft model, `sampled`,
`rejection` and `penalised` by those options, `grammar` with one and drafts by suffix, `talk` turn
after turn from a prompt cache, `talks` two texts at once, which change slots at the end. `memory
SCRIPT POLICY` plays a bundled script. @MODEL names another model; key=value a field of the
run's options.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from engine.analysis.findings.check import recorded, with_consequences
from engine.audit.run_audit import audit_of
from engine.compare.comparison import Comparison
from engine.compare.lane_spec import NOISE_LANE, LaneSpec
from engine.compare.memory_engine import play_script
from engine.compare.memory_script_parser import memory_scripts
from engine.decode.held_sequences import PromptCache
from engine.options import CacheOptions, Prompt, RunOptions, SamplerOptions, SpecOptions
from engine.run import Run
from engine.session import Session
from engine.trace.store import TraceStore
from resources import MEMORY_SCRIPTS
from tests.support.golden_runs import options_of, prompt_of, session, tokens_of
from tests.support.grammar_runs import rules_file

MODELS = {
    "gdn": "qwen35-c-v2x-mtp-f32",
    "kda": "bailingmoe3-a-mtp-f32",
    "ssd": "nemotron_h_moe-b-mtp-f32",
    "conv": "lfm2-a-tied-f32",
    "tokens": "qwen4exp-b-qsa-f32",
    "rings": "deepseek4-a-mtp-f32",
    "dense": "qwen3-f-f32",
}
TRUE = ("concurrency-lost", "drafter-mute", "checkpoint-dominates", "prompt-processed-again")
"""Findings above info that are true of what is played."""
_SCRIPT = [1, 0, 3, 2, 4]
_SAMPLERS = {
    "sampled": SamplerOptions(temp=1.2, seed=11),
    "rejection": SamplerOptions(temp=1.2, seed=11),
    "penalised": SamplerOptions(repeat_penalty=4.0, repeat_last_n=-1),
}


@dataclass
class Seen:
    """What a play shows. by: compare, run or memory, or error where no finding names one; "" =
    nothing. rules: of the findings above info, first causes and all; text: what was emitted."""

    by: str = ""
    causes: set[str] = field(default_factory=set)
    rules: set[str] = field(default_factory=set)
    text: list[Any] = field(default_factory=list)

    def look(self, trace: TraceStore, by: str) -> None:
        """Add the findings of a trace."""
        found = [f for f in recorded(trace) if f.severity != "info" and f.rule not in TRUE]
        self.rules |= {f.rule for f in found}
        self.causes |= {cause.rule for cause, _ in with_consequences(found)}
        if found and self.by in ("", "error"):
            self.by = by


def play(line: str) -> Seen:
    """Play a line. An error of the engine is noted like a finding, and what was recorded before."""
    words = line.split()
    name = next((word[1:] for word in words if word.startswith("@")), "gdn")
    kind, setting, *more = (word for word in words if not word.startswith("@"))
    model = MODELS[name]
    seen = Seen()
    if kind == "memory":
        _memory(seen, setting, more[0], model)
    elif kind in ("lane", "lane3", "slots"):
        _compared(seen, setting, kind, model)
    else:
        changes = {k: _value(v) for k, v in (pair.split("=") for pair in more)}
        for run in _runs(seen, kind, setting, model, changes):
            seen.look(run.trace, "run")
            seen.text.append(tokens_of(run))
    return seen


def _value(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _prompts(model: str, n: int) -> list[Prompt]:
    tokens = prompt_of(model).tokens
    return [Prompt(tokens[: 14 - 3 * i]) for i in range(n)]


def _compared(seen: Seen, setting: str, kind: str, model: str) -> None:
    n = {"lane": 1, "lane3": 3, "slots": 4}[kind]
    options = options_of(
        8 if kind == "slots" else 16, n_max=4, parallel=min(n, 3 - (n == 4)), ignore_eos=True
    )
    trace = TraceStore()
    try:
        comparison = Comparison(
            session(model),
            _prompts(model, n),
            options,
            [NOISE_LANE, LaneSpec.parse(setting)],
            trace,
            draft_accept=_SCRIPT,
        )
        while comparison.step():
            pass
        if any(verdict.is_beyond for verdict in comparison.results()):
            seen.by = "compare"
    except Exception:  # whatever a bug raises
        seen.by = "error"
    seen.look(trace, "compare")


def _runs(seen: Seen, kind: str, policy: str, model: str, changes: dict[str, Any]) -> Iterator[Run]:
    n = {"uneven": 3, "queue": 4, "lookup": 2}.get(kind, 1)
    spec = SpecOptions(("draft-mtp",), n_max=4)
    if kind == "uneven":
        spec = replace(spec, p_min=0.8)
    if kind == "tree":
        spec = replace(spec, tree=(8, 2, 1))
    if kind == "lookup":
        spec = SpecOptions(("ngram-simple",), n_max=4)
    if kind == "grammar":
        spec = SpecOptions(("suffix",))
    if kind == "draft-simple":
        spec = SpecOptions(("draft-simple",), n_max=4)
    if kind == "rejection":
        spec = replace(spec, accept="rejection")
    options = replace(options_of(24, ignore_eos=True), spec=spec, rollback=policy)
    if kind in _SAMPLERS:
        options = replace(options, sampler=_SAMPLERS[kind])
    if kind == "grammar":
        options = replace(options, sampler=_in_pairs(), ignore_eos=False, n_predict=48)
    n_slots = {"uneven": 3, "queue": 2, "lookup": 2, "talks": 2}.get(kind, 1)
    options = replace(options, parallel=n_slots, **changes)
    opened = session(model, "qwen35-a-f32" if kind == "draft-simple" else None)
    if kind in ("talk", "talks"):
        talk, options = _TALKS[kind], replace(options, n_ctx=96, n_ubatch=8, n_predict=6)
        yield from talk(seen, opened, options, model)
        return
    yield from _ran(seen, opened, _prompts(model, n), options)


@cache
def _in_pairs() -> SamplerOptions:
    """A grammar of letters and digits by turns, so that a draft may end within it, drawn from."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    sampler = rules_file(folder, "start: pair{30}\npair: /[ab]/ /[01]/\n")
    return replace(sampler, temp=2.0, seed=11, top_k=0, top_p=1.0, min_p=0.0)


def _ran(
    seen: Seen,
    opened: Session,
    prompts: list[Prompt],
    options: RunOptions,
    cache_: PromptCache | None = None,
) -> Iterator[Run]:
    audit = audit_of(opened, prompts, options, can_repeat=cache_ is None)
    run = opened.start(prompts, options, None, cache_, audit=audit)
    try:
        while run.step():
            pass
    except Exception:  # whatever a bug raises
        seen.by = seen.by or "error"
    yield run


def _talk(seen: Seen, opened: Session, options: RunOptions, model: str) -> Iterator[Run]:
    """Prompts that share less and less with those before them, then texts cut back by one token
    more each time, with another after it and without."""
    tokens, cached = prompt_of(model).tokens, PromptCache(CacheOptions(checkpoint_min_step=5))

    def answered(prompt: Sequence[int]) -> Iterator[Run]:
        for run in _ran(seen, opened, [Prompt(tuple(prompt))], options, cached):
            text[:] = [*prompt, *tokens_of(run)[0]]
            yield run

    text: list[int] = []
    for prompt in (tokens[:24], tokens[:22], (*tokens[:18], *tokens[:9]), tokens[:24], tokens[:24]):
        yield from answered(prompt)
    # the end of a prompt once more, as a slot would have it that counts what it processed twice
    yield from answered((*text[:24], *text[20:24], *text[24:]))
    for n_cut in range(1, 7):
        yield from answered((*text[:-n_cut], tokens[n_cut]))
    for n_cut in range(1, 5):
        yield from answered(text[:-n_cut])


def _talks(seen: Seen, opened: Session, options: RunOptions, model: str) -> Iterator[Run]:
    """Two texts at once, then shorter ones with other ends, then each in the other's slot."""
    tokens, cached = prompt_of(model).tokens, PromptCache(CacheOptions(checkpoint_min_step=5))
    a, b = tokens[:24], (*tokens[9:24], *tokens[:8])
    ends = (*a[:20], *tokens[:5]), (*b[:19], *tokens[3:9])
    for both in ((a, b), (a[:22], b[:20]), ends, (b, a)):
        yield from _ran(seen, opened, [*map(Prompt, both)], options, cached)


_TALKS = {"talk": _talk, "talks": _talks}


@cache
def _scripts() -> dict[str, Any]:
    return {script.name: script for script in memory_scripts(MEMORY_SCRIPTS)}


def _memory(seen: Seen, name: str, policy: str, model: str) -> None:
    trace = TraceStore()
    try:
        played = play_script(session(model), _scripts()[name], policy, trace)
        while played.step():
            pass
        if played.failures:
            seen.by = "memory"
            seen.causes.add(name)
            seen.rules.add(name)
    except Exception:  # whatever a bug raises
        seen.by = "error"
    seen.look(trace, "memory")
