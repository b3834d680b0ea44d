"""The prompts of the next run: one text for each sequence, repeated if asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from PySide6.QtCore import Signal
from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QHBoxLayout,
    QPlainTextEdit,
    QToolButton,
    QWidget,
)

from app.engine_thread.requests import ChatWrap
from app.widgets.build import made, vbox
from app.widgets.fields import text, whole
from app.widgets.option_groups import put_entry
from engine.errors import OptionError
from resources import demo_prompts

_LINES = 4
_MOST_PROMPTS = 64


class PromptBox(QWidget):
    """One prompt at a time in the editor; the list next to the examples leads to the others."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._examples = demo_prompts()
        self._texts = [""]
        self._removed: list[tuple[int, str]] = []
        self._make_fields()
        self.choice.activated.connect(self._go_to)
        self.add_button.clicked.connect(self.add)
        self.remove_button.clicked.connect(self.remove)
        self.undo_button.clicked.connect(self.undo)
        self.editor.textChanged.connect(self._keep)
        self.examples.activated.connect(self._use_example)
        self.copies.valueChanged.connect(lambda _: self.changed.emit())
        self.chat_box.toggled.connect(self._on_chat)
        self.chat_kwargs.textChanged.connect(lambda _: self.changed.emit())
        self._lay_out()
        self._list()

    def texts(self) -> list[str]:
        """The prompts, one per sequence."""
        return [text for text in self._texts for _ in range(self.copies.value())]

    def chat(self) -> ChatWrap | None:
        """How to wrap the texts. Raises OptionError for variables that are no JSON object."""
        if not self.chat_box.isChecked():
            return None
        written = self.chat_kwargs.text().strip()
        if not written:
            return ChatWrap()
        try:
            values = json.loads(written)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise OptionError(
                "The chat template's variables are no JSON object.",
                'Write them like {"enable_thinking": false}.',
            )
        return ChatWrap(values)

    def entries(self) -> dict[str, Any]:
        """The contents of the box, for `put_entries`."""
        return {
            "texts": list(self._texts),
            "copies": self.copies.value(),
            "chat": self.chat_box.isChecked(),
            "chat_kwargs": self.chat_kwargs.text(),
        }

    def put_entries(self, entries: Mapping[str, Any]) -> None:
        """Put back what `entries` gave; what is of another type stays as it is."""
        texts = entries.get("texts")
        if isinstance(texts, list) and texts and all(isinstance(one, str) for one in texts):
            self._texts = texts[:_MOST_PROMPTS]
            self._list()
        for name, field in (
            ("copies", self.copies),
            ("chat", self.chat_box),
            ("chat_kwargs", self.chat_kwargs),
        ):
            put_entry(field, entries.get(name))

    def use_first(self) -> None:
        """Put the first bundled prompt in place, unless something is typed already."""
        if not self.editor.toPlainText():
            self.editor.setPlainText(self._examples[0].text)

    def add(self) -> None:
        """One more sequence, with a prompt of its own."""
        if len(self._texts) < _MOST_PROMPTS:
            self._texts.append("")
            self._list(len(self._texts) - 1)
            self.editor.setFocus()
            self.changed.emit()

    def remove(self) -> None:
        """Take the prompt on show away; the last one stays."""
        if len(self._texts) > 1:
            index = self.choice.currentIndex()
            self._removed.append((index, self._texts.pop(index)))
            self._list(max(0, index - 1))
            self.changed.emit()

    def undo(self) -> None:
        """Bring back the prompt that was removed last."""
        if self._removed and len(self._texts) < _MOST_PROMPTS:
            index, words = self._removed.pop()
            self._texts.insert(min(index, len(self._texts)), words)
            self._list(min(index, len(self._texts) - 1))
            self.changed.emit()

    # -- internals -------------------------------------------------------------------------

    def _make_fields(self) -> None:
        self.examples = made(QComboBox, placeholderText="Examples")
        self.examples.addItems([prompt.title for prompt in self._examples])
        self.examples.setCurrentIndex(-1)
        self.examples.setAccessibleName("Example prompts")
        self.examples.setToolTip("Put an example into the prompt on show")
        self.choice = QComboBox()
        self.choice.setAccessibleName("Prompt to edit")
        self.choice.setToolTip("The prompt on show; each is a sequence of its own")
        self.add_button = _button("+", "Add a sequence with a prompt of its own")
        self.remove_button = _button("−", "Remove the prompt on show")
        self.undo_button = _button("↶", "Bring back the prompt removed last")
        self.editor = QPlainTextEdit()
        self.editor.setAccessibleName("Prompt")
        self.editor.setPlaceholderText("Text to continue")
        self.editor.setTabChangesFocus(True)
        self.editor.setAcceptDrops(False)  # a dropped model is for the window
        self.editor.setFixedHeight(_LINES * self.fontMetrics().lineSpacing() + 12)
        self.copies = whole(1, 64, 1)
        self.copies.setPrefix("same prompt × ")
        self.copies.setToolTip("Sequences with the same prompt")
        self.copies.setAccessibleName("Sequences with the same prompt")
        self.chat_box = QCheckBox("chat template")
        self.chat_box.setToolTip("--chat: wrap each text as a user's message")
        self.chat_kwargs = text('{"enable_thinking": false}')
        self.chat_kwargs.setToolTip("--chat-template-kwargs: variables of the template, JSON")
        self.chat_kwargs.setAccessibleName("Variables of the chat template")
        self.chat_kwargs.hide()

    def _lay_out(self) -> None:
        top, below = QHBoxLayout(), QHBoxLayout()
        for row in (top, below):
            row.setSpacing(4)
        for box in (self.examples, self.choice):
            box.setMinimumContentsLength(6)
            box.setSizeAdjustPolicy(box.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
            top.addWidget(box, 1)
        for widget in (self.undo_button, self.add_button, self.remove_button):
            top.addWidget(widget)
        below.addWidget(self.chat_box)
        below.addStretch(1)
        below.addWidget(self.copies)
        vbox(top, self.editor, below, self.chat_kwargs, of=self, margins=(0, 0, 0, 0), spacing=4)

    def _list(self, index: int = 0) -> None:
        """List the prompts and show one."""
        n = len(self._texts)
        self.choice.clear()
        self.choice.addItems([f"Prompt {i + 1} of {n}" for i in range(n)])
        self.choice.setVisible(n > 1)
        self.remove_button.setEnabled(n > 1)
        self.undo_button.setVisible(bool(self._removed))
        self._go_to(index)

    def _go_to(self, index: int) -> None:
        self.choice.setCurrentIndex(index)
        self.editor.setPlainText(self._texts[index])

    def _keep(self) -> None:
        self._texts[max(0, self.choice.currentIndex())] = self.editor.toPlainText()

    def _use_example(self, index: int) -> None:
        self.editor.setPlainText(self._examples[index].text)
        self.examples.setCurrentIndex(-1)

    def _on_chat(self, on: bool) -> None:
        self.chat_kwargs.setVisible(on)
        self.changed.emit()


def _button(text: str, tip: str) -> QToolButton:
    button = made(QToolButton, text=text, toolTip=tip, accessibleName=tip)
    button.setFocusPolicy(button.focusPolicy().StrongFocus)
    return button
