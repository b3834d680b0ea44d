"""The layout of a token area while it is being made: what to show before it is complete."""

from __future__ import annotations

from collections.abc import Callable

from app.panels.tokens.token_layout import TokenLayout
from app.trace_models.token_stream import TokenStream

SLICE_SECONDS = 0.008
"""How long one call may lay out, so that a window keeps its 30 frames per second."""
_TAIL_TOKENS = 3000


class TokenRows:
    """A layout that grows in slices, and a preview of the wanted place until it gets there.

    The wanted place is a token to have at the top, or the end of the stream.
    """

    def __init__(
        self,
        stream: TokenStream,
        measure: Callable[[str], float],
        width: float,
        hidden: frozenset[int],
    ) -> None:
        self._stream = stream
        self._measure = measure
        self._width = width
        self._hidden = hidden
        self.layout = self._new_layout(0)
        self.preview: TokenLayout | None = None
        self.anchor: int | None = None
        """The token to have at the top, until it has been scrolled to."""

    def look_at(self, token: int | None) -> None:
        """Want a token at the top, or with None no place but the one that is scrolled to."""
        self.anchor = token
        self.preview = None

    def advance(self, rows: int, *, follow: bool) -> bool:
        """Lay out for one slice; `rows` fit into sight. True when nothing is left to lay out."""
        complete = self.layout.advance(SLICE_SECONDS)
        if complete or self._arrived(rows, follow):
            self.preview = None
        elif follow:
            end = len(self._stream)
            if self.preview is None or self.preview.placed < end - _TAIL_TOKENS:
                self.preview = self._new_layout(max(0, end - _TAIL_TOKENS))
            self.preview.advance_to(end)  # whole, or a busy machine would show older tokens
        elif self.anchor is not None:
            if self.preview is None:
                self.preview = self._new_layout(self.anchor)
            while self.preview.n_rows <= rows and not self.preview.complete:
                self.preview.advance_to(self.preview.placed + rows)
        return complete

    def _arrived(self, rows: int, follow: bool) -> bool:
        if follow:
            return False
        if self.anchor is None:
            return True
        layout = self.layout
        return layout.placed > self.anchor and layout.n_rows > layout.row_of(self.anchor) + rows

    def _new_layout(self, start: int) -> TokenLayout:
        return TokenLayout(self._stream, self._measure, self._width, self._hidden, start)
