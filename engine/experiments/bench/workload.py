"""W1, the workload of llama.cpp #19493: four turns of one conversation, with counters per turn.

Every turn's prompt is all that came before and the next message, so positions, cells and
checkpoints are used again and again; the counters are those in which damage shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine.conversation.conversation import Rendering
from engine.experiments.bench.prompts import NamedPrompt
from engine.experiments.bench.request import Configuration, RequestResult, measure_request
from engine.options import Prompt

if TYPE_CHECKING:
    from engine.decode.held_sequences import PromptCache
    from engine.session import Session


class Workload:
    """One conversation in one configuration; `done` holds the finished turns.

    messages: the user's, in order. chat: wrap them in the model's template instead of joining
    messages and answers as they are. cache: of this conversation alone; None = every turn is
    processed from its first token on.
    """

    def __init__(
        self,
        session: Session,
        messages: Sequence[NamedPrompt],
        configuration: Configuration,
        *,
        chat: bool = False,
        template_values: dict[str, Any] | None = None,
        cache: PromptCache | None = None,
    ) -> None:
        self._session, self._messages = session, list(messages)
        self._rendering = Rendering(session, is_chat=chat, template_values=template_values)
        self.configuration = configuration
        self._cache = cache
        self._message_starts: tuple[int, ...] = ()
        self.done: list[RequestResult] = []

    def turns(self) -> Iterator[RequestResult]:
        """Decode turn after turn; each is in `done` before it is yielded.

        Raises what Session.start and ChatTemplate.render raise.
        """
        history: list[dict[str, str]] = []
        for message in self._messages:
            history.append({"role": "user", "content": message.text})
            measured = measure_request(
                self._session, self._prompt(history), message.name, self.configuration, self._cache
            )
            history.append({"role": "assistant", "content": measured.text})
            self.done.append(measured)
            yield self.done[-1]

    def _prompt(self, history: Sequence[dict[str, str]]) -> Prompt:
        """The prompt of a turn; its last message starts where it parts from the text before."""
        if not self._cache or not self.done:
            return self._rendering.prompt(history)
        prompt = self._rendering.behind(history[:-1], history[-1:], self._message_starts)
        self._message_starts = prompt.message_starts
        return prompt


def turn_counters(turn: RequestResult) -> dict[str, Any]:
    """A turn by the names that `bench w1` has.

    prompt_tokens = cache_n (used again) + prompt_n (processed). tokens: emitted. drafts:
    verification steps. drafted = accepted + rejected. restores: checkpoints put back.
    duplicate_cells: most attention cells beyond one per position, scanned after every round.
    """
    return {
        "turn": turn.prompt,
        "prompt_tokens": turn.cache_n + turn.prompt_n,
        "cache_n": turn.cache_n,
        "prompt_n": turn.prompt_n,
        "tokens": turn.predicted_n,
        "drafts": turn.num_spec_steps,
        "drafted": turn.draft_n,
        "accepted": turn.draft_n_accepted,
        "rejected": turn.draft_n - turn.draft_n_accepted,
        "restores": turn.num_restores,
        "duplicate_cells": turn.duplicate_cells,
        "tokens_per_second": turn.predicted_per_second,
        "text": turn.text,
    }


def turn_totals(turns: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Sums of the counters over the turns; of duplicate_cells, the most."""
    names = "prompt_tokens cache_n prompt_n tokens drafts drafted accepted rejected restores"
    sums = {name: sum(turn[name] for turn in turns) for name in names.split()}
    return sums | {"duplicate_cells": max((turn["duplicate_cells"] for turn in turns), default=0)}
