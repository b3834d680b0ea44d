"""The sides of a comparison, a sequence of each run: prompt, text, drafts, counters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.analysis.acceptance.accept_rules import AcceptRule, rule_of
from engine.audit.recorded_drafts import Counts, RecordedDraft, RecordedDrafts, sums
from engine.draft.registry import DRAFTERS
from engine.errors import OptionError
from engine.foreign import LONGEST_DRAFT, OutOfRangeError, real
from engine.observe.rescoring.request_sampler import SAMPLING
from engine.observe.rescoring.texts import asked_of
from engine.trace.facts import RequestFacts
from engine.trace.records import EMITTED_KINDS, MISSING
from engine.trace.run_ref import RunColumns, RunRef, rows_by_sequence
from engine.trace.writer import this_engine

if TYPE_CHECKING:
    from engine.session import Session

_SHOWN = 16
_LIMITS = {"n_max": LONGEST_DRAFT, "n_min": LONGEST_DRAFT, "p_min": 1.0}
"""Settings that limit the length of drafts, with their maxima."""
_WAYS = ("adapt", "tree", "verify_max")
"""Other settings, which logs do not report."""
_LONGEST_PROMPT = 1 << 20
LONGEST_TEXT = 8192
"""Most tokens that are decoded again."""


@dataclass(frozen=True, slots=True)
class DraftSide:
    """A sequence of one of the runs.

    prompt: ids, None if unknown; n_prompt: its length. ids: of the emitted tokens, up to the first
    unknown one. text: both; an unknown prompt is a row of MISSING. drafts: the verified ones, in
    order. starts: first positions of its rounds, plain: of those without a draft. counters: the
    engine's own for this sequence.
    """

    name: str
    run: RunRef
    seq_id: int
    prompt: tuple[int, ...] | None
    n_prompt: int
    ids: tuple[int, ...]
    text: list[int]
    drafts: list[RecordedDraft]
    starts: Sequence[int]
    plain: Sequence[int]
    drafters: list[str]
    asked: RequestFacts
    counters: Mapping[str, Any]
    session: Session | None = None

    @property
    def has_ids(self) -> bool:
        """Whether any draft token is known."""
        return any(draft.tokens for draft in self.drafts)

    @property
    def has_rejected(self) -> bool:
        """Whether any rejected token is known."""
        return any(len(draft.tokens) > draft.n_accepted for draft in self.drafts)

    @property
    def knows_all(self) -> bool:
        """Whether all draft tokens are recorded, as by this engine."""
        source = self.run.facts.source
        return self.has_rejected and (source is None or source.engine == this_engine().engine)

    @property
    def reasons(self) -> set[str]:
        """Why its drafts end, or are not made, as far as recorded."""
        asked = RunColumns(self.run.store, "drafts", self.run.run_id)
        return {*asked.texts("reason", np.flatnonzero(asked["seq_id"] == self.seq_id))}

    @property
    def has_lengths(self) -> bool:
        """Whether the length of each draft is known: SGLang counts the rows of verify batches,
        equally many in each, even if a drafter has found fewer tokens."""
        source = self.run.facts.source
        is_padded = source is not None and source.engine == "sglang" and not self.has_rejected
        return not is_padded or len({draft.n_drafted for draft in self.drafts}) > 1

    @property
    def looks_up(self) -> bool:
        """Whether one drafter without a model made all its drafts."""
        names = self.drafters
        return len(names) == 1 and names[0] in DRAFTERS and not DRAFTERS[names[0]].needs

    @property
    def counts(self) -> Counts:
        """Sums over all its rounds."""
        return sums(self.drafts)

    def piece(self, token: int) -> bytes:
        """The text of a token, empty if unknown."""
        if self.session is not None and 0 <= token < self.session.config.n_vocab:
            return self.session.tokenizer.piece(token)
        return self.run.store.pieces.get(token, b"")

    def shown(self, token: int) -> str:
        """A token in messages."""
        return f"{token} {self.piece(token).decode('utf-8', 'replace')!r}"

    def n_confirmed(self, draft: RecordedDraft) -> int | None:
        """Leading tokens of a draft that match the text; None if an unknown id decides it."""
        text = self.text
        for i in range(draft.n_drafted):
            at = draft.pos0 + 1 + i
            if at >= len(text) or i >= len(draft.tokens):
                return None
            if draft.tokens[i] != text[at]:
                return i
        return draft.n_drafted

    def advance(self, draft: RecordedDraft) -> int | None:
        """Accepted tokens by the start of the next round; None for the last one."""
        later = bisect_right(self.starts, draft.pos0)
        n_own = draft.n_decoded - draft.n_accepted
        return self.starts[later] - draft.pos0 - n_own if later < len(self.starts) else None

    @property
    def n_beyond(self) -> int:
        """Drafted tokens that every round counts in addition to those with known ids, if it has
        those of rejected ones."""
        beyond = {draft.n_drafted - len(draft.tokens) for draft in self.drafts}
        return beyond.pop() if self.has_rejected and len(beyond) == 1 else 0

    @property
    def rule(self) -> AcceptRule | None:
        """The acceptance rule; None if it is not reported and nothing shows it. Drafts that are
        always the best candidate show `match`."""
        n_shown = sum(draft.n_accepted for draft in self.drafts if draft.tops)
        return rule_of(self.run.facts) or (AcceptRule() if n_shown >= _SHOWN else None)

    @property
    def draws(self) -> bool:
        """Whether the drafter samples its tokens: by its rule, at a temperature above 0."""
        temp = self.setting.get("temperature")
        is_greedy = isinstance(temp, int | float) and temp <= 0
        return self.rule is not None and self.rule.draws and not is_greedy

    @property
    def limits(self) -> dict[str, Any]:
        """The settings of its single lookup drafter, or the length limits of a drafter with a
        model, as far as options or a log have them."""
        facts = self.run.facts
        if facts.options is not None and self.looks_up:
            return asdict(DRAFTERS[self.drafters[0]].options_of(facts.options.spec))
        if not any(DRAFTERS[name].needs for name in self.drafters if name in DRAFTERS):
            return {}
        if facts.options is not None:
            return {name: getattr(facts.options.spec, name) for name in (*_LIMITS, *_WAYS)}
        launch = facts.server.launch if facts.server else {}
        found = dict[str, Any]()
        for name, most in _LIMITS.items():
            values = launch.get(name, ())
            if len(values) == 1:
                with suppress(OutOfRangeError):
                    found[name] = real(values[0], most)
        return found

    @property
    def always_drafts(self) -> bool:
        """Whether its options leave no round without a draft, except by the token limit."""
        own = [x for name, x in self.limits.items() if name != "n_max"]
        is_known = self.run.facts.options is not None and bool(own)
        return is_known and not any(x for x in own if x != "none")

    @property
    def setting(self) -> dict[str, Any]:
        """The sampler's settings, as far as known."""
        return {name: value for name, value in self.asked.settings.items() if name in SAMPLING}


def sides_of(name: str, run: RunRef, session: Session | None = None) -> list[DraftSide]:
    """The sequences of a run that have drafts, or all of one with sums alone. Raises OptionError if
    none has any."""
    recorded = RecordedDrafts(run.store, run.run_id)
    texts = {}
    if session is not None:
        from engine.observe.rescoring.texts import TextReader

        texts = {text.seq_id: text for text in TextReader(session, run.store, run.run_id).texts()}
    table, n = run.store.tokens, len(run.store.tokens)
    emitted = rows_by_sequence(run.store, run.run_id, EMITTED_KINDS)
    prompts = rows_by_sequence(run.store, run.run_id, ("prompt",))
    found, drafters = [], recorded.drafters() or list(run.facts.speculative_types or ())
    drafts_of = recorded.of(None)
    if not len(run.store.rounds):
        drafts_of = {seq_id: [] for seq_id in emitted}
    for seq_id, drafts in drafts_of.items():
        rows = emitted.get(seq_id)
        if rows is None:
            continue
        pos, ids = table.column("pos", 0, n)[rows].tolist(), table.column("token_id", 0, n)[rows]
        kept: list[int] = []
        for at, token in zip(pos, ids.tolist(), strict=True):
            if token == MISSING or at != pos[0] + len(kept):
                break
            kept.append(token)
        prompt = None
        mine = prompts.get(seq_id)
        if mine is not None and len(mine) == pos[0]:
            prompt = tuple(table.column("token_id", 0, n)[mine].tolist())
        if (text := texts.get(seq_id)) is not None and len(text.ids):
            prompt, kept = text.prompt, text.ids.tolist()
        if prompt is not None and MISSING in prompt:
            prompt = None
        if pos[0] > _LONGEST_PROMPT:
            raise OptionError(
                f"Sequence {seq_id} of {name} starts at position {pos[0]:,}; at most "
                f"{_LONGEST_PROMPT:,} prompt tokens can be compared.",
                "Record a shorter prompt.",
            )
        whole = [*((MISSING,) * pos[0] if prompt is None else prompt), *kept]
        starts = recorded.starts(seq_id), recorded.starts(seq_id, plain=True)
        text_of = name, run, seq_id, prompt, pos[0], tuple(kept), whole
        told = asked_of(run.facts, seq_id), _told(run, seq_id)
        found.append(DraftSide(*text_of, drafts, *starts, drafters, *told, session))
    if not found and recorded.n_rounds and not recorded.n_drafted:
        raise OptionError(
            f"{name} never drafted in its {recorded.n_rounds} rounds.",
            "Check it with `draftscope acceptance`, or record it with its drafter switched on.",
        )
    if not found:
        raise OptionError(*no_drafts(name))
    return found


def no_drafts(name: str) -> tuple[str, str]:
    """What a side without drafts lacks, and how to record it."""
    fact = f"{name} has no round with known draft tokens, only totals or text."
    return fact, (
        "Use a recording of single rounds: `draftscope observe URL -p TEXT --trace DIR`, a "
        "llama-server log of -lv 5 with LLAMA_TRACE=1, a record with token ids and counts per "
        "step (vLLM), or a stream with ids (SGLang)."
    )


def _told(run: RunRef, seq_id: int) -> Mapping[str, Any]:
    for request in run.facts.requests or ():
        if request.seq_ids == [seq_id]:
            return request.told
    alone = len(run.facts.requests or ()) <= 1
    return (run.facts.told or {}) if alone else {}


def paired(a: Sequence[DraftSide], b: Sequence[DraftSide]) -> list[tuple[DraftSide, DraftSide]]:
    """Sequences that belong together: with the same prompt, else in order."""
    left, partner = [*b], dict[int, DraftSide]()
    for i, one in enumerate(a):
        own = [key for key in (one.prompt, one.asked.prompt) if key is not None]
        alike = (k for k, x in enumerate(left) if x.prompt in own or x.asked.prompt in own)
        if (at := next(alike, None)) is not None:
            partner[i] = left.pop(at)
    rest = iter(left)
    pairs = [(one, partner[i] if i in partner else next(rest, None)) for i, one in enumerate(a)]
    return [(one, other) for one, other in pairs if other is not None]
