"""ngram-simple: what followed the latest earlier occurrence of the last n tokens."""

from __future__ import annotations

from collections.abc import Sequence

from engine.draft.drafter import Draft, tree_of
from engine.draft.ngram_drafter import History, NgramDrafter, NgramSizes, nothing
from engine.draft.spec import DrafterSpec


class NgramSimple(NgramDrafter):
    """Copies up to size_m tokens after the match, but not fewer than size_n. tree: of a tree, what
    followed earlier matches too, the latest first."""

    name = "ngram-simple"
    find = staticmethod(History.find_last)

    def __init__(self, sizes: NgramSizes, tree: Sequence[int] = ()) -> None:
        super().__init__()
        self._n, self.n_max, self._tree = sizes.size_n, sizes.size_m, tree

    def _look_up(self, seq: int, history: History, last: int) -> Draft:
        n, m, length = self._n, self.n_max, len(history)
        if length <= n + m + 1:
            return nothing("too-short-history")
        pattern = [*history.part(length - n + 1), last]
        match = self.find(history, pattern, 1, length - n - 1)  # position 0 means no match
        if match < 0:
            return nothing("no-match")
        copied = history.part(match + n, match + n + m)
        if len(copied) < n:
            return nothing("copy<n", match_pos=match, n_raw=len(copied))
        reason = "history-end" if len(copied) < m else ""
        if not self._tree:
            return Draft(copied, match_pos=match, reason=reason)
        starts = [*history.find_all(pattern, 1, match)][::-1]
        draft = tree_of([history.part(start + n, start + n + m) for start in starts], self._tree)
        draft.match_pos, draft.reason = match, reason
        return draft


SPEC = DrafterSpec(
    NgramSimple.name,
    "what followed the latest occurrence of the last n tokens",
    lambda inputs: NgramSimple(inputs.options, inputs.tree),
    NgramSizes,
    lambda sizes: sizes.size_m,
    field="ngram_simple",
    branches=True,
    reasons={
        "copy<n": "fewer tokens follow the match than the n-gram has",
        "history-end": "the history ends before a whole draft",
    },
)
