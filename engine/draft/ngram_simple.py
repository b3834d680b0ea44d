"""ngram-simple: what followed the latest earlier occurrence of the last n tokens."""

from __future__ import annotations

from engine.draft.drafter import Draft
from engine.draft.ngram_drafter import History, NgramDrafter, NgramSizes, nothing
from engine.draft.spec import DrafterSpec


class NgramSimple(NgramDrafter):
    """Copies up to size_m tokens after the match, but not fewer than size_n."""

    name = "ngram-simple"

    def __init__(self, sizes: NgramSizes) -> None:
        super().__init__()
        self._n, self.n_max = sizes.size_n, sizes.size_m

    def _look_up(self, seq: int, history: History, last: int) -> Draft:
        n, m, length = self._n, self.n_max, len(history)
        if length <= n + m + 1:
            return nothing("too-short-history")
        pattern = [*history.part(length - n + 1), last]
        match = history.find_last(pattern, 1, length - n - 1)  # position 0 means no match
        if match < 0:
            return nothing("no-match")
        copied = history.part(match + n, match + n + m)
        if len(copied) < n:
            return nothing("copy<n", match_pos=match, n_raw=len(copied))
        reason = "history-end" if len(copied) < m else ""
        return Draft(copied, match_pos=match, reason=reason)


SPEC = DrafterSpec(
    NgramSimple.name,
    "what followed the latest occurrence of the last n tokens",
    lambda inputs: NgramSimple(inputs.options),
    NgramSizes,
    lambda sizes: sizes.size_m,
    field="ngram_simple",
    reasons={
        "copy<n": "fewer tokens follow the match than the n-gram has",
        "history-end": "the history ends before a whole draft",
    },
)
