"""Messages as a prompt: through the model's chat template, or joined as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.conversation.turns import Message, content_of
from engine.decode.held_sequences import n_common
from engine.errors import OptionError
from engine.options import Prompt

if TYPE_CHECKING:
    from engine.session import Session


class Rendering:
    """How the messages of a conversation become prompts.

    is_chat: whether by the chat template; else contents are joined without anything between them.
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
                "The model has no chat template.", "Hold the conversation as plain text."
            )
        self.is_chat = is_chat
        self._session, self._values = session, dict(template_values or {})
        if tools:
            self._values["tools"] = tools

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """All that was said, up to where the answer begins. Raises ChatTemplateError."""
        chat = self._session.chat
        if not self.is_chat or chat is None:
            return self._session.prompt("".join(map(content_of, messages)))
        return self._session.prompt(chat.render(list(messages), **self._values))

    def behind(
        self, before: Sequence[Message], said: Sequence[Message], starts: Sequence[int]
    ) -> Prompt:
        """The prompt of a turn. before: what had been said; starts: where the messages of the
        turns before it begin. Its own begin where it parts from the text before."""
        prompt = self.prompt([*before, *said])
        if not before:
            return prompt
        start = n_common(self.prompt(before).tokens, prompt.tokens)
        earlier = (at for at in starts if at < start)
        return replace(prompt, message_starts=(*earlier, start))
