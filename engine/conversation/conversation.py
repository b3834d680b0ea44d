"""A conversation over one session: every turn is a run that reuses what memory holds. Its prompt is
made from messages by the model's chat template, or by concatenation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import msgspec

from engine.conversation.turns import Message, Turn, TurnTree, content_of, conversations
from engine.decode.held_sequences import PromptCache
from engine.decode.round import RoundObserver
from engine.errors import ChatTemplateError, OptionError
from engine.options import Prompt, RunOptions
from engine.run import Run
from engine.session import Session
from engine.trace.facts import TurnFacts
from engine.trace.prompt_reuse import n_common
from engine.trace.store import TraceStore

_NOTHING_WRITTEN = 1
"""Tokens of a run with a given answer: its prompt is processed, and one token chosen."""


MakeAudit = Callable[[Sequence[Prompt], RunOptions], RoundObserver | None]
"""Makes the observer that checks a run of these prompts and options, None = no check."""


class Conversation:
    """One conversation of a trace.

    number: of the conversation, None for a new one. cache: the prompt cache; several conversations
    may share one, as they share a server's slots. None: every prompt is processed from its first
    token.
    """

    def __init__(
        self,
        session: Session,
        trace: TraceStore,
        rendering: Rendering,
        cache: PromptCache | None,
        number: int | None = None,
    ) -> None:
        self._session, self._trace, self._cache = session, trace, cache
        self._rendering = rendering
        known = conversations(trace.runs)
        self.number = max(known, default=-1) + 1 if number is None else number
        self._tokens: dict[int, list[int]] = {}
        """Prompt and answer tokens of the turns generated here, by number."""

    @property
    def tree(self) -> TurnTree:
        """The turns so far."""
        return TurnTree.of(self._trace.runs, self.number)

    def start(
        self,
        messages: Sequence[Message],
        parent: int | None,
        options: RunOptions,
        answer: Message | None = None,
        *,
        audit: MakeAudit | None = None,
    ) -> TurnRun:
        """Start a turn after another one (None: as a first turn).

        To edit a turn, start one with other messages after its parent. answer: a given answer; its
        tokens are put into memory as if the model had generated them. One sequence is decoded;
        options.parallel says how many texts are kept in memory. audit: makes the observer that
        checks the run. Raises OptionError for a turn that does not exist or has no answer yet, and
        what Session.start and ChatTemplate.render raise.
        """
        tree = self.tree
        before, starts = self._before(tree, parent), [t.start for t in tree.path(parent) if t.start]
        prompt = self._rendering.behind(before, messages, starts)
        memorise = None
        if answer is not None:
            options = replace(options, n_predict=_NOTHING_WRITTEN)
            written = self._rendering.answer([*before, *messages], answer, prompt)
            memorise = partial(self._memorise, prompt, written, options)
        number = max(tree.turns, default=-1) + 1
        auditor = audit([prompt], options) if audit else None
        run = self._session.start([prompt], options, self._trace, self._cache, audit=auditor)
        self._trace.runs[run.run_id].turn = TurnFacts(
            self.number,
            number,
            parent,
            [dict(message) for message in messages],
            answer,
            is_recorded=answer is not None,
            is_chat=self._rendering.is_chat,
            start=prompt.message_starts[-1] if prompt.message_starts else 0,
            rewritten_at=self._rewritten_at(parent, prompt),
        )
        if answer is not None:
            self._tokens[number] = [*prompt.tokens, *written]
        return TurnRun(run, prompt, self._tokens, number, memorise)

    def _memorise(self, prompt: Prompt, written: Sequence[int], options: RunOptions) -> Run | None:
        """A run without a trace that puts a recorded answer into memory after its prompt."""
        if not written or self._cache is None:
            return None
        text = replace(prompt, tokens=(*prompt.tokens, *written), n_written=len(written))
        return self._session.start([text], options, None, self._cache)

    def _before(self, tree: TurnTree, parent: int | None) -> list[Message]:
        if parent is None:
            return []
        turn = tree.turns.get(parent)
        if turn is None or turn.answer is None:
            what = "does not exist" if turn is None else "has no answer yet"
            raise OptionError(
                f"Turn {parent + 1} of conversation {self.number + 1} {what}.",
                "Continue after another turn.",
            )
        return tree.messages(parent)

    def _rewritten_at(self, parent: int | None, prompt: Prompt) -> int | None:
        """Where a prompt departs from the tokens of the previous turn."""
        tokens = self._tokens.get(-1 if parent is None else parent)
        if tokens is None:
            return None
        n = n_common(tokens, prompt.tokens)
        return n if n < len(tokens) else None


class TurnRun:
    """The run of a turn; at its end the answer is stored with the messages, and a recorded one is
    put into memory by the run that memorise makes."""

    def __init__(
        self,
        run: Run,
        prompt: Prompt,
        written: dict[int, list[int]],
        number: int,
        memorise: Callable[[], Run | None] | None = None,
    ) -> None:
        self.run, self.run_id, self.trace = run, run.run_id, run.trace
        self.number = number
        self.prompt, self._written = prompt, written
        self._memorise = memorise
        self._answering: Run | None = None

    @property
    def done(self) -> bool:
        """Whether the turn has ended."""
        return self.run.done and self._memorise is None and self._answering is None

    @property
    def emitted(self) -> list[list[int]]:
        """Tokens of the answer so far."""
        return self.run.emitted

    @property
    def turn(self) -> Turn:
        """The turn in its present state."""
        return TurnTree.of(self.trace.runs, self._noted.conversation).turns[self.number]

    def step(self) -> bool:
        """One round (Run.step)."""
        return self._go(Run.step)

    def advance(self) -> bool:
        """Several rounds (Run.advance)."""
        return self._go(Run.advance)

    def _go(self, go: Callable[[Run], bool]) -> bool:
        if self._answering is not None:
            if not go(self._answering):
                self._answering = None
            return not self.done
        try:
            go(self.run)
        except BaseException:
            self._memorise = None
            raise
        finally:
            self._close()
        if self.run.done and self._memorise is not None:
            self._answering, self._memorise = self._memorise(), None
        return not self.done

    def cancel(self, seq_id: int) -> None:
        """End the turn (Run.cancel)."""
        self.run.cancel(seq_id)

    def stop(self) -> None:
        """End the turn now; what was generated is its answer."""
        self._memorise = None
        if self._answering is not None:
            self._answering.stop()
            self._answering = None
        self.run.stop()
        self._close()

    @property
    def _noted(self) -> TurnFacts:
        turn = self.trace.runs[self.run_id].turn
        assert turn is not None
        return turn

    def _close(self) -> None:
        turn = self._noted
        if not self.run.done or turn.answer is not None:
            return
        (result,) = self.run.results()
        self._written[self.number] = [*self.prompt.tokens, *result.tokens]
        answer = {"role": "assistant", "content": result.text}
        self.trace.runs[self.run_id].turn = msgspec.structs.replace(turn, answer=answer)


class Rendering:
    """Formatting of a conversation's messages as prompts.

    is_chat: use the chat template; else contents are concatenated.
    """

    def __init__(
        self,
        session: Session,
        *,
        is_chat: bool,
        template_values: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        """tools: described to the template. Raises OptionError for a model without a template."""
        if is_chat and session.chat is None:
            raise OptionError(
                "The model has no chat template.", "Run the conversation as plain text."
            )
        self.is_chat = is_chat
        self._session, self._values = session, dict(template_values or {})
        if tools:
            self._values["tools"] = tools

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """The conversation up to the start of the answer. Raises ChatTemplateError."""
        chat = self._session.chat
        if not self.is_chat or chat is None:
            return self._session.prompt("".join(map(content_of, messages)))
        return self._session.prompt(chat.render(list(messages), **self._values))

    def answer(self, said: Sequence[Message], answer: Message, prompt: Prompt) -> tuple[int, ...]:
        """Tokens that a recorded answer had when it was generated, without the end token: as the
        template renders the newest answer if that continues the prompt, else its thinking and
        content as they are. said: all messages before it."""
        text, chat = _as_written(answer), self._session.chat
        if self.is_chat and chat is not None:
            values = self._values | {"add_generation_prompt": False}
            try:
                shown = chat.render([*said, answer], **values)
            except ChatTemplateError:
                shown = ""
            thinking = str(answer.get("reasoning_content") or "")
            if shown.startswith(prompt.text) and thinking.strip() in shown[len(prompt.text) :]:
                text = shown[len(prompt.text) :]
        tokens = self._session.prompt(prompt.text + text).tokens
        n = len(prompt.tokens)
        if tokens[:n] != prompt.tokens:  # a token spans the start of the answer
            tokens, n = tuple(self._session.tokenizer.encode(text, parse_special=True)), 0
        ends = self._session.tokenizer.eog_ids
        return tuple(takewhile(lambda token: token not in ends, tokens[n:]))

    def behind(
        self, before: Sequence[Message], said: Sequence[Message], starts: Sequence[int]
    ) -> Prompt:
        """The prompt of a turn. before: previous messages; starts: where the messages of the
        previous turns begin. Its own begin where it departs from the previous text."""
        prompt = self.prompt([*before, *said])
        if not before:
            return prompt
        start = n_common(self.prompt(before).tokens, prompt.tokens)
        earlier = (at for at in starts if at < start)
        return replace(prompt, message_starts=(*earlier, start))


def _as_written(answer: Message) -> str:
    """The text of an answer as generated, as far as its parts contain it."""
    thinking, text = answer.get("reasoning_content"), content_of(answer)
    return f"<think>\n{thinking}\n</think>\n\n{text}" if thinking else text
