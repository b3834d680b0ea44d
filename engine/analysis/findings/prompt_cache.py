"""Rules about what a prompt takes up from an earlier one: context checkpoints, rollbacks between
turns, and what drafters hold of the slot.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from engine.analysis.findings.observed import observed_hits
from engine.analysis.findings.rule import CACHE, DRAFTS, ERROR, WARNING, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun
from engine.trace.prompt_reuse import PromptReuseRecord, ReuseSource, WhyProcessed


def _checkpoint_boundary(run: ExaminedRun) -> Iterator[RuleHit]:
    for record in run.facts.prompt_reuse or ():
        wrong = [one for one in record.created if one.n_tokens != one.state_tokens]
        if wrong:
            first = wrong[0]
            yield RuleHit(
                None,
                record.seq_id,
                f"A context checkpoint is kept for {first.n_tokens:,} tokens, but its state was "
                f"that of {first.state_tokens:,}.",
                f"{len(wrong)} of {len(record.created)} checkpoints saved for this prompt of "
                f"{record.n_prompt:,} tokens",
            )


def _checkpoint_invalidated(run: ExaminedRun) -> Iterator[RuleHit]:
    for record in run.facts.prompt_reuse or ():
        lost = [at for at in record.usable if at > record.n_reused]
        if not lost:
            continue
        at = max(lost)
        times = _times_processed(run, record, at - 1)
        yield RuleHit(
            None,
            record.seq_id,
            f"{at - record.n_reused:,} tokens were processed again, because a context checkpoint "
            f"at {at:,} was erased that was usable.",
            f"the texts have {record.n_common:,} tokens in common; erased: "
            f"{', '.join(f'{n:,}' for n in sorted(lost))}; processed {times} times by now",
        )


def _times_processed(run: ExaminedRun, record: PromptReuseRecord, token: int) -> int:
    """How often a token has been processed: in this run and in those before it that found the
    same text in the slot, back to the one that brought it."""
    times = 1
    for run_id in range(run.run_id - 1, -1, -1):
        earlier = [r for r in run.trace.runs[run_id].prompt_reuse or () if r.slot == record.slot]
        if len(earlier) != 1:
            break
        parts = [p for p in earlier[0].parts if p.start <= token < p.stop]
        times += len(parts)
        if earlier[0].n_common <= token:
            break
    return times


def _rollback_twice(run: ExaminedRun) -> Iterator[RuleHit]:
    for record in run.facts.prompt_reuse or ():
        state = record.state_tokens
        if record.source is not ReuseSource.ROLLBACK or state is None or not record.depth:
            continue
        if record.n_reused - state == record.depth:
            yield RuleHit(
                None,
                record.seq_id,
                f"The recurrent state was rolled back by {record.depth:,} tokens twice.",
                f"the prompt goes on at token {record.n_reused:,}, the state holds {state:,}, "
                f"attention cells {record.cell_tokens}; {record.n_held:,} tokens were held before",
            )


def _drafter_carried(run: ExaminedRun) -> Iterator[RuleHit]:
    for record in run.facts.prompt_reuse or ():
        carried = {name: n for name, n in record.drafters.items() if n > record.n_reused}
        for name, n in carried.items():
            yield RuleHit(
                None,
                record.seq_id,
                f"{name} holds {n:,} tokens of the slot's text, of which this prompt has "
                f"{record.n_reused:,}.",
                f"slot {record.slot}; {n - record.n_reused:,} tokens are another prompt's",
            )
            break


_LEAST_AGAIN = 32
"""Tokens that are not worth a word."""


def _processed_again(run: ExaminedRun) -> Iterator[RuleHit]:
    """As a server's log or replies said, else by what our own engine noted."""
    said = list(observed_hits(run, "prompt-processed-again"))
    yield from said
    named = {hit.seq_id for hit in said}
    if run.facts.prompt_reuse is None:
        yield from (hit for hit in _repeated(run) if hit.seq_id not in named)
    for record in () if named else run.facts.prompt_reuse or ():
        lost = [part for part in record.parts if part.why in _LOST]
        n = sum(part.stop - part.start for part in lost)
        if n < max(_LEAST_AGAIN, record.n_common // 4):
            continue
        held = ", ".join(f"{at:,}" for at, _ in record.held) or "none"
        yield RuleHit(
            None,
            record.seq_id,
            f"{record.n_common:,} of the prompt's {record.n_prompt:,} tokens were in memory, "
            f"{record.n_reused:,} were reused and {n:,} processed again, because "
            f"{lost[0].why.sentence}.",
            f"memory held {record.n_held:,} tokens, context checkpoints at {held}",
        )


def _repeated(run: ExaminedRun) -> Iterator[RuleHit]:
    """Requests to a server that begin with the messages of an earlier one, and took little of its
    prompt from the cache. The server alone knows why."""
    known: dict[str, tuple[int, int]] = {}
    for number, one in enumerate(run.facts.requests or ()):
        cached, processed = (one.told.get(name) for name in ("cache_n", "prompt_n"))
        keys, digest = [], hashlib.sha256()
        for message in one.messages:
            digest.update(json.dumps(message, sort_keys=True).encode())
            keys.append(digest.hexdigest())
        if not keys or cached is None or processed is None:
            continue
        n = int(cached + processed)
        earlier = next((known[key] for key in reversed(keys) if key in known), None)
        known[keys[-1]] = number, n
        if earlier is None or one.settings.get("cache_prompt") is False:
            continue
        again = min(earlier[1], n) - int(cached)
        if again < max(2 * _LEAST_AGAIN, earlier[1] // 2):
            continue
        yield RuleHit(
            None,
            next(iter(one.seq_ids), None),
            f"Request {number + 1} begins with the messages of request {earlier[0] + 1}, whose "
            f"prompt had {earlier[1]:,} tokens; of its own {n:,} tokens {int(cached):,} were "
            "reused.",
            f"about {again:,} tokens processed again; the server's log says why",
        )


_LOST = (
    WhyProcessed.BEHIND_CHECKPOINT,
    WhyProcessed.NO_CHECKPOINT,
    WhyProcessed.EVICTED,
    WhyProcessed.OFF,
)
RULES = (
    Rule(
        "prompt-processed-again",
        WARNING,
        "Prompt processed again",
        "Memory held the beginning of the prompt, and it was processed once more: recurrent states "
        "and sliding windows cannot go back, so a prompt that parts from the old text goes on from "
        "a context checkpoint before that place, or from the start.",
        "Usual causes: a chat template that leaves out the thinking of earlier turns, a client "
        "that changes earlier messages, too few context checkpoints (--ctx-checkpoints), "
        "another prompt in the slot (--slot-prompt-similarity, id_slot). Keep the text before the "
        "newest message as it was.",
        _processed_again,
    ),
    Rule(
        "checkpoint-boundary",
        ERROR,
        "State cached at a wrong boundary",
        "A context checkpoint is found by the number of tokens that it covers. If the state was "
        "copied before or after that place, a later prompt goes on with tokens missing or in it "
        "twice, though all positions look right.",
        "Copy the state between two passes, and keep it under the position that the recurrent "
        "memory has then.",
        _checkpoint_boundary,
        CACHE,
    ),
    Rule(
        "checkpoint-invalidated",
        WARNING,
        "Usable checkpoint erased",
        "Every prompt of a conversation repeats the text before it. A checkpoint within the common "
        "prefix stays true; erased, the whole text is processed again, turn after turn.",
        "Erase only checkpoints that cover more tokens than the texts have in common.",
        _checkpoint_invalidated,
    ),
    Rule(
        "rollback-twice",
        ERROR,
        "Rollback applied twice",
        "The recurrent state went back twice as far as the text, for example at the end of a turn "
        "and again at the begin of the next one. Tokens are missing from the state.",
        "Undo tokens in one place, and compare the state's position with that of the cells.",
        _rollback_twice,
        CACHE,
    ),
    Rule(
        "drafter-carried",
        WARNING,
        "Drafter's state carried into another request",
        "The target's slot was cut to what the new prompt has in common with the old text, the "
        "drafter's was not. Drafts are made from another text; only acceptance suffers.",
        "Cut or clear the drafter's memory wherever the target's is.",
        _drafter_carried,
        DRAFTS,
    ),
)
