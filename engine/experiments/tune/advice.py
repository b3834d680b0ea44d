"""Advice from measurements: which setting to use, its break-even point, and where drafts are right.

A setting is also given as flags of other engines, with a note on missing equivalents. llama.cpp's
names are those of its server; vLLM's and SGLang's those of their documentation on speculative
decoding. Drafters that an engine lacks have no flags.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.analysis.what_if.positions import survival_of
from engine.analysis.what_if.rules import FIXED, RULES, Setting
from engine.analysis.what_if.surface import Outcomes, simulate
from engine.draft.adaptive import AdaptRule
from engine.experiments.bench.prompts import NamedPrompt
from engine.experiments.bench.request import PLAIN
from engine.experiments.tune.confirm import Confirmed, SpeedComparison, compare
from engine.experiments.tune.lengths import DraftSetting, drafting, has_floor
from engine.experiments.tune.record import TuneRecording
from engine.memory.policies import memory_sizes
from engine.model.info import ModelInfo
from engine.options import RunOptions

_AS_GOOD = 0.005
"""A simpler setting that loses at most this share of the speed is preferred."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A drafter under a rule. setting: of the rule. acceptance: NaN without drafts. runs_here:
    whether this engine has the rule."""

    drafter: str
    rule: str
    setting: Setting
    tokens_per_second: float
    acceptance: float
    runs_here: bool

    @property
    def draft(self) -> DraftSetting:
        """The equivalent user setting under the fixed rule."""
        return DraftSetting(
            self.drafter, int(self.setting["n_max"]), float(self.setting.get("p_min", 0.0))
        )


def estimates(recordings: Sequence[TuneRecording]) -> list[Estimate]:
    """Every setting of every rule for every drafter with drafts and times."""
    found: list[Estimate] = []
    for one in recordings:
        if one.costs is None or not one.rounds.n_drafts:
            continue
        for rule in RULES.values():
            found += _of_rule(one, rule)
    return found


def _of_rule(one: TuneRecording, rule: AdaptRule) -> Iterable[Estimate]:
    settings = rule.settings(one.rounds.n_max)
    # confidence does not predict random acceptance
    has_floors = has_floor(one.drafter) and not one.rounds.is_independent
    if not (has_floors and one.rounds.has_confidence):
        settings = [setting for setting in settings if not setting.get("p_min")]
    played = simulate(one.rounds, one.costs, rule, settings)
    speeds, rates = played.tokens_per_second(), played.acceptance()
    for setting, speed, rate in zip(settings, speeds.tolist(), rates.tolist(), strict=True):
        if np.isfinite(speed):
            yield Estimate(one.drafter, rule.name, setting, speed, rate, rule.runs_here)


def best_of_rules(found: Sequence[Estimate]) -> list[Estimate]:
    """The fastest of each drafter and rule, fastest first."""
    best: dict[tuple[str, str], Estimate] = {}
    for one in sorted(found, key=lambda one: -one.tokens_per_second):
        best.setdefault((one.drafter, one.rule), one)
    return [*best.values()]


def to_confirm(found: Sequence[Estimate], n: int = 3) -> list[Estimate]:
    """The best settings that this engine can run: for each drafter and length the lowest floor that
    is as good as its best. One of them is of another drafter if there is one, because estimates may
    favour a drafter."""
    best: dict[tuple[str, int], list[Estimate]] = {}
    for one in found:
        if one.runs_here and one.rule == FIXED.name:
            best.setdefault((one.drafter, one.draft.n_max), []).append(one)
    chosen = []
    for same in best.values():
        least = max(one.tokens_per_second for one in same) * (1 - _AS_GOOD)
        good = [one for one in same if one.tokens_per_second >= least]
        chosen.append(min(good, key=lambda one: one.draft.p_min))
    chosen.sort(key=lambda one: -one.tokens_per_second)
    first, rest = chosen[:n], chosen[n:]
    others = [one for one in rest if one.drafter != first[0].drafter]
    if others and len({one.drafter for one in first}) == 1 < n:
        first[-1] = others[0]
    return first


def outcome(recording: TuneRecording, setting: DraftSetting) -> Outcomes:
    """One setting of the fixed rule, played in every text."""
    played = {"n_max": setting.n_max, "p_min": setting.p_min}
    return simulate(recording.rounds, recording.costs, FIXED, [played])


@dataclass(frozen=True, slots=True)
class Verdict:
    """chosen: the configuration to use, PLAIN if none is shown to be faster, empty where the time
    ended before that was decided, as `undecided` says. against_plain, against_others: of the
    fastest measured one."""

    chosen: str
    fastest: str
    against_plain: SpeedComparison | None
    against_others: tuple[SpeedComparison, ...]
    undecided: str = ""

    @property
    def lines(self) -> list[str]:
        """As sentences."""
        found = [one.words for one in (self.against_plain, *self.against_others) if one]
        if self.chosen == PLAIN:
            found.append("nothing is significantly faster than plain decoding: do not use drafts")
        return [*found, self.undecided] if self.undecided else found


def verdict(
    confirmed: Sequence[Confirmed], n_pairs: int = 0, once: Mapping[str, float] | None = None
) -> Verdict:
    """confirmed: the plain one and others; the fastest has most pairs. n_pairs: planned; fewer
    decide where they show which is faster. once: speeds measured once, where there are none."""
    known = confirmed or [Confirmed(name, (x,), 0, 0, ()) for name, x in (once or {}).items()]
    plain = next(one for one in known if one.name == PLAIN)
    # by pairs, because effects of text or load apply to all of them
    others = sorted(
        (one for one in known if one is not plain),
        key=lambda one: (-len(one.speeds), -compare(one, plain).ratio),
    )
    if not others:
        return Verdict(PLAIN, PLAIN, None, ())
    fastest, *rest = others
    against, n = compare(fastest, plain), len(plain.speeds) * bool(confirmed)
    against_others = tuple(compare(fastest, other) for other in rest)
    if n < n_pairs and not against.is_shown:
        words = (
            f"not decided between {PLAIN} and {fastest.name}: time ran out after {n} of "
            f"{n_pairs} pairs; so far {fastest.name} has {against.ratio:.2f} times the speed of "
            f"{PLAIN}{'' if n else ', measured once'}"
        )
        best = fastest.name if against.ratio > 1 else PLAIN
        return Verdict("", best, against if n else None, against_others if n else (), words)
    is_faster = against.is_shown and against.wins * 2 > against.n
    chosen = fastest.name if is_faster else PLAIN
    return Verdict(chosen, fastest.name, against, against_others)


def by_position(recording: TuneRecording, n_max: int) -> list[dict[str, Any]]:
    """For each draft place: how often the token was right given correct predecessors (conditional),
    how often everything up to it was right (survival), and drafts judged there (n)."""
    found = survival_of(recording.rounds)
    rates = found.conditional
    rows = zip(rates.tolist(), np.cumprod(rates).tolist(), found.judged.tolist(), strict=True)
    return [
        {"position": i, "conditional": right, "survival": all_right, "n": n}
        for i, (right, all_right, n) in enumerate(rows, 1)
        if i <= n_max and n
    ]


def by_category(
    recording: TuneRecording, setting: DraftSetting, prompts: Sequence[NamedPrompt]
) -> list[dict[str, Any]]:
    """Simulated figures of a setting for the prompts of each category, in the order of the set."""
    played = outcome(recording, setting)
    n_texts = played.tokens.shape[1]
    groups: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts[:n_texts]):
        groups.setdefault(prompt.category, []).append(i)
    return [
        {
            "category": category,
            "n_prompts": len(texts),
            "acceptance": _finite(played.acceptance(np.array(texts))[0]),
            "tokens_per_round": _finite(played.tokens_per_round(np.array(texts))[0]),
            "tokens_per_second": _finite(played.tokens_per_second(np.array(texts))[0]),
        }
        for category, texts in groups.items()
    ]


def undo_bytes(info: ModelInfo, options: RunOptions) -> int:
    """Bytes per slot to undo rejected tokens: snapshots of recurrent states, and a checkpoint if
    drafts may exceed the snapshots."""
    sizes = memory_sizes(info, 1, options.snapshots, 1, options.rollback)
    checkpoint = sizes["checkpoint"]
    if options.spec.longest > options.snapshots:
        checkpoint = max(checkpoint, sizes["state"])
    return sizes["snapshots"] + checkpoint


def pareto(found: Sequence[Estimate], info: ModelInfo, base: RunOptions) -> list[dict[str, Any]]:
    """Pareto-optimal simulated settings of this engine by speed and memory, the latter for several
    numbers of slots."""
    rows = [
        (undo_bytes(info, drafting(base, one.draft)), -one.tokens_per_second, one)
        for one in found
        if one.rule == FIXED.name and one.runs_here
    ]
    rows.sort(key=lambda row: row[:2])
    best, kept = 0.0, []
    for n_bytes, _, one in rows:
        if one.tokens_per_second > best:
            best = one.tokens_per_second
            kept.append(
                {
                    "setting": one.draft.name,
                    "tokens_per_second": best,
                    "bytes": {str(n): n * n_bytes for n in (1, 4, 16)},
                }
            )
    return kept


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


_FILE = "FILE"
_VLLM = {
    "draft-mtp": "mtp",
    "draft-simple": "draft_model",
    "draft-eagle3": "eagle3",
    "draft-dflash": "dflash",
    "suffix": "suffix",
    "ngram-simple": "ngram",
}
_SGLANG = {
    "draft-mtp": "NEXTN",
    "draft-simple": "STANDALONE",
    "draft-eagle3": "EAGLE3",
    "draft-dflash": "DFLASH",
}
_LLAMA_LENGTH = {
    "ngram-simple": "--spec-ngram-simple-size-m {n}",
    "ngram-map-k": "--spec-ngram-map-k-size-m {n}",
    "ngram-map-k4v": "--spec-ngram-map-k4v-size-m {n}",
    "ngram-mod": "--spec-ngram-mod-n-max {n} --spec-ngram-mod-n-min 0",
}
_DRAFTS_WITH_FILE = ("draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark")


EngineFlags = tuple[str, str, tuple[str, ...]]
"""An engine, flags for its command, empty if it cannot do it, and the parts of the setting without
a flag, in words."""


def engine_flags(
    setting: DraftSetting | None, files: Mapping[str, str] | None = None
) -> list[EngineFlags]:
    """The flags for each engine. setting: None = plain decoding. files: names of drafter files;
    drafters without one are in the command already."""
    if setting is None:
        return [
            ("llama-server", "--spec-type none", ()),
            ("vLLM", "", ("plain decoding is the default without --speculative-config",)),
            ("SGLang", "", ("plain decoding is the default without --speculative-algorithm",)),
        ]
    file = _FILE if files is None else files.get(setting.drafter, "")
    return [_llama_server(setting, file), _vllm(setting, file), _sglang(setting, file)]


def _llama_server(setting: DraftSetting, file: str) -> EngineFlags:
    name, drafter = "llama-server", setting.drafter
    if drafter in _LLAMA_LENGTH:
        length = _LLAMA_LENGTH[drafter].format(n=setting.n_max)
        return (name, f"--spec-type {drafter} {length}", ())
    if not drafter.startswith("draft-"):
        return (name, "", (f"it has no {drafter}",))
    words = [f"--spec-type {drafter}", f"--spec-draft-n-max {setting.n_max}"]
    words.append(f"--spec-draft-p-min {setting.p_min:g}")
    if drafter in _DRAFTS_WITH_FILE and file:
        words.append(f"-md {shlex.quote(file) if file.isprintable() else _FILE}")
    return (name, " ".join(words), ())


def _vllm(setting: DraftSetting, file: str) -> EngineFlags:
    method = _VLLM.get(setting.drafter)
    if method is None:
        return ("vLLM", "", (f"no flags for {setting.drafter} are known",))
    config: dict[str, object] = {"method": method, "num_speculative_tokens": setting.n_max}
    missing = [_no_floor(setting)] if setting.p_min else []
    if setting.drafter in _DRAFTS_WITH_FILE:
        config["model"] = "MODEL"
        missing.append("MODEL is the drafter as vLLM loads it, not a GGUF file")
    if method == "ngram":
        config["prompt_lookup_max"] = 12
    return ("vLLM", f"--speculative-config '{json.dumps(config)}'", tuple(filter(None, missing)))


def _sglang(setting: DraftSetting, file: str) -> EngineFlags:
    algorithm = _SGLANG.get(setting.drafter)
    if algorithm is None:
        return ("SGLang", "", (f"no flags for {setting.drafter} are known",))
    words = [f"--speculative-algorithm {algorithm}"]
    missing = [_no_floor(setting)] if setting.p_min else []
    if setting.drafter in _DRAFTS_WITH_FILE:
        words.append("--speculative-draft-model-path MODEL")
        missing.append("MODEL is the drafter as SGLang loads it, not a GGUF file")
    if algorithm == "DFLASH":
        words.append(f"--speculative-num-draft-tokens {setting.n_max + 1}")
    else:
        words.append(
            f"--speculative-num-steps {setting.n_max} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {setting.n_max + 1}"
        )
    return ("SGLang", " ".join(words), tuple(missing))


def _no_floor(setting: DraftSetting) -> str:
    return f"it has no minimum confidence: p_min {setting.p_min:g} is left out"
