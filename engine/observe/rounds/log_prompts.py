"""Prompts in a llama-server's log: tokens held by the slot, common, reused and processed, and the
context checkpoints that were there or missing.

Wordings of builds from b6500 on. At default verbosity newer builds only give the similarity of the
chosen slot, with three digits, so the common prefix is known within that precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct, to_builtins

from engine.trace.facts import RunFacts
from engine.trace.prompt_reuse import (
    ProcessedPart,
    PromptReuseRecord,
    ReuseSource,
    SavedCheckpoint,
    WhyProcessed,
)

RULE = "prompt-processed-again"
_MOST_CHECKPOINTS = 128
"""Checkpoints of a slot."""
_MOST_ENTRIES = 1 << 16
"""Checkpoints kept of a log, over all requests."""
_MOST_FINDINGS = 8
_DIGIT = 0.0005
"""Possible error of a share with three digits."""
_FEW = 2
"""Smallest logged size of a real sliding window; smaller ones mean none."""
_LEAST_AGAIN = 32
"""Fewer tokens are not reported: a template's end, the last token."""


class LoggedPrompt(Struct):
    """One request. Checkpoints by tokens covered; None: not logged. by: how the slot was chosen.
    similarity: common shares of the prompt and of the slot's text, with three digits. held: the
    slot's checkpoints when the prompt arrived. before: tokens of the slot's previous prompt.
    back_to: position to return to, a window before the common end; has_window: whether there is
    one."""

    slot: int
    by: str = ""
    similarity: tuple[float, float] | None = None
    n_common: int | None = None
    n_prompt: int | None = None
    n_held: int | None = None
    pos_min: int | None = None
    n_swa: int = 0
    is_forced: bool = False
    restored: int | None = None
    cached: int | None = None
    processed: int | None = None
    prompt_ms: float | None = None
    written: int | None = None
    before: int | None = None
    back_to: int | None = None
    has_window: bool = False
    held: list[int] = []
    gone: list[int] = []
    erased: list[int] = []
    evicted: list[int] = []
    created: list[SavedCheckpoint] = []

    @property
    def n_reused(self) -> int | None:
        """Tokens that needed no processing."""
        if self.cached is not None:
            return self.cached
        known = self.n_prompt is not None and self.processed is not None
        return max((self.n_prompt or 0) - (self.processed or 0), 0) if known else None

    def look_back(self, first: int, last: int, at: int) -> None:
        """A checkpoint of the slot, by first and last position, is compared with a place."""
        self.back_to, self.has_window = at, first != last
        if last + 1 not in self.held and len(self.held) < _MOST_CHECKPOINTS:
            self.held.append(last + 1)

    def common(self) -> tuple[int, int] | None:
        """Bounds of the number of tokens common with the slot."""
        if self.n_common is not None:
            return self.n_common, self.n_common
        if self.back_to is not None and not (self.has_window and self.n_swa < _FEW):
            return (self.back_to + self.n_swa,) * 2
        if self.back_to is not None and self.n_prompt is not None:
            return self.back_to, self.n_prompt
        if not self.n_held:
            return None if self.n_held is None else (0, 0)
        if self.n_reused == self.n_held:  # nothing had to be undone
            return self.n_held, self.n_held
        if self.similarity is None or self.n_prompt is None:
            return None
        least, most = 0.0, float(min(self.n_prompt, self.n_held))
        for share, n in zip(self.similarity, (self.n_prompt, self.n_held), strict=True):
            least, most = max(least, (share - _DIGIT) * n), min(most, (share + _DIGIT) * n)
        return (max(0, round(least)), round(most)) if least <= most + 1 else None


class PromptLog:
    """Tracks the contents of a server's slots, and each of their prompts."""

    def __init__(self) -> None:
        self._chosen: dict[int, tuple[str, tuple[float, float] | None, int | None]] = {}
        """By slot how it was chosen, newest last."""
        self._released: dict[int, tuple[int | None, int | None]] = {}
        """By slot the tokens it holds, and those of the last prompt."""
        self._empty: int | None = None
        """Initial number of tokens in slots, if the log starts with the server."""
        self._room = _MOST_ENTRIES
        self._kept: dict[int, list[int]] = {}
        self._gone: dict[int, list[int]] = {}

    def selected(
        self, slot: int, by: str, of: float | None, n_common: int | None, kept: float | None
    ) -> None:
        """A slot was chosen for the next request. of, kept: common shares of the prompt and of the
        slot's contents; n_common: the same in tokens."""
        shares = None if kept is None else (min(of or 0.0, 1.0), min(kept, 1.0))
        self._chosen.pop(slot, None)
        self._chosen[slot] = by, shares, n_common

    def server(self, said: str) -> None:
        """A message without a slot: the latest chosen slot may get another text from the cache."""
        if "found better prompt" in said and self._chosen:
            slot = next(reversed(self._chosen))
            self._released[slot] = None, None
            self._chosen[slot] = *self._chosen[slot][:2], None
            for known in (self._kept, self._gone):
                known.pop(slot, None)
        elif "model loaded" in said:
            self._empty = 0

    def begin(self, slot: int) -> LoggedPrompt:
        """Start the prompt of a slot."""
        held, before = self._released.get(slot, (self._empty, None))
        chosen = self._chosen.pop(slot, ("", None, None))
        kept, gone = self._kept.get(slot, [])[:], self._gone.get(slot, [])[:]
        return LoggedPrompt(slot, *chosen, n_held=held, before=before, held=kept, gone=gone)

    def released(self, prompt: LoggedPrompt, n_tokens: int, *, is_whole: bool) -> None:
        """The slot is done; the newest token is not in it."""
        if prompt.n_prompt is None and is_whole and prompt.written is not None:
            prompt.n_prompt = max(n_tokens - prompt.written + 1, prompt.processed or 0)
        self._released[prompt.slot] = n_tokens, prompt.n_prompt

    def checkpoint(
        self,
        prompt: LoggedPrompt,
        what: str,
        last: int | None,
        n_tokens: int | None,
        n_swa: int | None,
        mib: float | None,
    ) -> None:
        """A checkpoint, by its last position or its tokens, is created, restored, erased or evicted
        ("erasing")."""
        n, n_bytes = n_tokens or (0 if last is None else last + 1), round((mib or 0.0) * 2**20)
        prompt.n_swa = prompt.n_swa if n_swa is None else n_swa
        self._room -= 1
        if self._room < 0:
            return
        kept = self._kept.setdefault(prompt.slot, [])
        if what == "created":
            if len(kept) < _MOST_CHECKPOINTS and len(prompt.created) < _MOST_CHECKPOINTS:
                kept.append(n)
                prompt.created.append(SavedCheckpoint(n, n, n_bytes))
            return
        if what == "restored":
            prompt.restored = n
            return
        if n in kept:
            kept.remove(n)
        lost = prompt.erased if what == "erased" else prompt.evicted
        gone = self._gone.setdefault(prompt.slot, [])
        for one in (lost, gone) if lost is prompt.evicted else (lost,):
            if len(one) < _MOST_CHECKPOINTS:
                one.append(n)


def note_prompts(facts: RunFacts, prompts: Iterable[tuple[int, LoggedPrompt | None]]) -> None:
    """Store prompt reuse in the facts of a run, by sequence. Of many reprocessed prompts the
    largest become findings."""
    again: list[tuple[int, dict[str, Any]]] = []
    n_prompts = 0
    for seq_id, prompt in prompts:
        if prompt is None:
            continue
        n_prompts += 1
        if (record := reuse_record(prompt, seq_id)) is not None:
            facts.add_to("prompt_reuse", to_builtins(record))
        if (finding := reuse_finding(prompt, seq_id)) is not None:
            again.append(finding)
    again.sort(key=lambda one: -one[0])
    shown = sorted(again[:_MOST_FINDINGS], key=lambda one: int(one[1]["seq_id"]))
    if len(again) > _MOST_FINDINGS:
        total = sum(n for n, _ in again)
        sentence = (
            f"{len(again):,} of {n_prompts:,} requests processed text again that was in their "
            f"slot, {total:,} tokens in total."
        )
        whole_log = {"rule": RULE, "message": sentence, "evidence": "the largest follow"}
        shown.insert(0, (total, whole_log))
    facts.add_to("observed_findings", *(finding for _, finding in shown))


def reuse_record(prompt: LoggedPrompt, seq_id: int) -> PromptReuseRecord | None:
    """The reuse of one prompt, if the log determines it; else None."""
    common, reused, n = prompt.common(), prompt.n_reused, prompt.n_prompt
    if common is None or common[0] != common[1] or reused is None or n is None or reused > n:
        return None
    if prompt.n_held is None:
        return None
    n_common = min(common[0], n)
    until = max(min(n_common, n - 1), reused)
    usable = [at for at in prompt.erased if reused < at <= n_common]
    parts = []
    if reused < until:
        parts.append(ProcessedPart(reused, until, _why(prompt, n_common, bool(usable))))
    why = WhyProcessed.NEW if n_common == prompt.n_held else WhyProcessed.DIFFERS
    if n_common >= n:
        why = WhyProcessed.LAST
    elif not prompt.n_held:
        why = WhyProcessed.FIRST
    source = ReuseSource.NOTHING
    if reused:
        source = ReuseSource.CELLS if n_common < prompt.n_held else ReuseSource.LIVE
    if reused and prompt.restored is not None:
        source = ReuseSource.CHECKPOINT
    return PromptReuseRecord(
        seq_id,
        prompt.slot,
        n,
        prompt.n_held,
        n_common,
        reused,
        source,
        [*parts, ProcessedPart(until, n, why)],
        depth=max(prompt.n_held - until, 0),
        checkpoint=prompt.restored if reused else None,
        created=prompt.created,
        evicted=prompt.evicted,
        erased=prompt.erased,
        usable=usable,
    )


def _why(prompt: LoggedPrompt, n_common: int, is_erased: bool) -> WhyProcessed:
    if is_erased:
        return WhyProcessed.ERASED
    if prompt.restored is not None:
        return WhyProcessed.BEHIND_CHECKPOINT
    if any(at <= n_common for at in prompt.gone + prompt.evicted):
        return WhyProcessed.EVICTED
    return WhyProcessed.NO_CHECKPOINT


def reuse_finding(prompt: LoggedPrompt, seq_id: int) -> tuple[int, dict[str, Any]] | None:
    """The number of tokens reprocessed although the slot held them, and the finding; None
    without."""
    common, reused, n = prompt.common(), prompt.n_reused, prompt.n_prompt
    if common is None or reused is None or n is None:
        return None
    n_common = min(common[0], n - 1)
    again = n_common - reused
    if again < max(_LEAST_AGAIN, n_common // 4):
        return None
    about = "" if common[0] == common[1] else "at least "
    processed = n - reused
    ms = "" if prompt.prompt_ms is None else f" in {prompt.prompt_ms:,.0f} ms"
    message = (
        f"Request {seq_id + 1} has {about}{n_common:,} of its {n:,} tokens in common with slot "
        f"{prompt.slot}'s text, but {reused:,} were reused: {processed:,} were processed{ms}, "
        f"{about}{again:,} of them again, {_because(prompt, n_common, reused)}."
    )
    notes = [] if prompt.n_held is None else [f"the slot had {prompt.n_held:,} tokens"]
    notes += _places(prompt, n_common)
    if prompt.by:
        notes.append(f"chosen by {prompt.by}")
    if prompt.pos_min is not None:
        notes.append(f"pos_min {prompt.pos_min:,}, n_swa {prompt.n_swa:,}")
    notes += _checkpoints(prompt)
    evidence = "; ".join(notes)
    return again, {"rule": RULE, "seq_id": seq_id, "message": message, "evidence": evidence}


def _because(prompt: LoggedPrompt, n_common: int, reused: int) -> str:
    memory = "the recurrent state"
    if prompt.n_swa > 1:
        memory = f"attention with a sliding window of {prompt.n_swa:,}"
    if not prompt.is_forced and prompt.restored is None:
        return "and the log does not show why"
    first = f"because {memory} cannot go back to token {n_common:,} and "
    usable = [at for at in prompt.erased if reused < at <= n_common]
    if usable:
        return f"{first}a usable context checkpoint of {max(usable):,} tokens was erased"
    if prompt.restored is not None:
        return f"{first}the nearest context checkpoint is that of {prompt.restored:,} tokens"
    if lost := [at for at in prompt.gone + prompt.evicted if at <= n_common]:
        return f"{first}the context checkpoint of {max(lost):,} tokens was evicted"
    others = sorted({*prompt.held, *prompt.erased})
    if not others:
        return f"{first}there is no context checkpoint at or before it in the log"
    return (
        f"{first}no context checkpoint lay at or before it (the nearest, of {others[0]:,} tokens, "
        f"at position {others[0] - 1:,}, lies after it"
        + (" and was erased)" if others[0] in prompt.erased else ")")
    )


def _places(prompt: LoggedPrompt, n_common: int) -> list[str]:
    """Where the texts diverge."""
    if prompt.before is None or not prompt.n_held or n_common >= prompt.n_held - 1:
        return []
    if n_common >= prompt.before - 1:
        where = (
            f"{max(n_common - prompt.before, 0):,} tokens into the previous request's answer: a "
            "chat template that leaves out thinking, or a client that changes answers"
        )
    else:
        where = (
            f"at token {n_common:,} of the previous request, which had {prompt.before:,}: an "
            "earlier message or the system prompt has changed"
        )
    return [f"the texts diverge {where}"]


def _checkpoints(prompt: LoggedPrompt) -> list[str]:
    found = []
    for what, places in (
        ("held", prompt.held),
        ("evicted", prompt.evicted),
        ("erased", prompt.erased),
        ("saved", [one.n_tokens for one in prompt.created]),
    ):
        if places:
            shown = ", ".join(f"{n:,}" for n in sorted(places)[:8])
            more = f" and {len(places) - 8} more" if len(places) > 8 else ""
            found.append(f"context checkpoints {what}: {shown}{more}")
    return found
