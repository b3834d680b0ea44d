"""The measurements of `draftscope bench` as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from app.cli.common import size

if TYPE_CHECKING:
    from engine.bench.rollback import RollbackRow
    from engine.bench.splits import SplitComparison
    from engine.bench.steps import StepRow

_ROLLBACK = (
    "{:>3} {:>4} {:<10} {:>7} {:>8} {:>8} {:>7} {:>8} {:>8} {:>8} {:>7} {:>8} {:>8} {:>7} {:>8} "
    "{:>8} {:>8} {:>6}"
)
_PHASES = ("save", "verify", "rollback", "restore", "replay", "total")
_SPLIT = "{:<6} {:>6} {:>9} {:>9}  |"
_STEP = "{:>5} {:>9} {:>9} {:>9}"


def rollback_lines(facts: dict[str, Any], rows: Iterable[RollbackRow]) -> Iterator[str]:
    """A heading, then one line per row as soon as it is there, a blank one between widths."""
    yield (
        "{layers} layers of {heads} heads x {dim} x {dim} and a convolution of {conv_dim} channels"
    ).format(**facts) + f": {size(facts['state_bytes'])} a state, float32"
    yield (
        "medians of {repeat} rounds, {threads} threads; times in ms, sizes in MiB per round"
    ).format(**facts)
    yield "min: fastest total; x none: total over none; beyond: held beyond one live state"
    yield ""
    yield _ROLLBACK.format(
        "T",
        "kept",
        "policy",
        *_PHASES,
        "min",
        "x none",
        "written",
        "copied",
        "saved",
        "restored",
        "held",
        "beyond",
        "error",
    )
    width = None
    for row in rows:
        if width not in (None, row.width):
            yield ""
        width = row.width
        yield _ROLLBACK.format(
            row.width,
            row.kept,
            row.policy,
            *(f"{row.ms[phase]:.2f}" if row.ms[phase] else "-" for phase in _PHASES),
            f"{row.min_ms:.2f}",
            f"{row.over_none:.2f}",
            *map(_mib, (row.written, row.copied, row.saved, row.restored, row.held, row.beyond)),
            "-" if row.state_nmse is None else f"{row.state_nmse:.0e}",
        )


def split_lines(facts: dict[str, Any], result: SplitComparison) -> Iterator[str]:
    """Both ways of splitting, with the sections of their time, and the ratio."""
    yield (
        f"{_model(facts)}: {result.n_seqs} sequences x {result.n_tokens} tokens, "
        f"--rollback {result.rollback}, median of {facts['repeat']} rounds"
    )
    yield ""
    sections = list(next(iter(result.figures.values())).sections)
    cells = "".join(f" {{:>{max(8, len(name))}}}" for name in sections)
    line = _SPLIT + cells
    yield line.format("split", "passes", "ms", "tokens/s", *sections)
    for mode, figures in result.figures.items():
        yield line.format(
            mode,
            figures.n_ubatches,
            f"{figures.ms:.2f}",
            f"{figures.tokens_per_second:.1f}",
            *(f"{figures.sections[name]:.2f}" for name in sections),
        )
    yield ""
    yield f"equal is {result.ratio:.2f} times as fast as seq (median of the rounds' ratios)"


def step_lines(facts: dict[str, Any], rows: Sequence[StepRow]) -> Iterator[str]:
    """One line per width."""
    yield (
        f"{_model(facts)}: behind one token, logits of {facts['outputs']}, "
        f"{facts['repeat']} repetitions"
    )
    yield ""
    yield _STEP.format("T", "min ms", "median ms", "tokens/s")
    for row in rows:
        yield _STEP.format(
            row.width, f"{row.min_ms:.2f}", f"{row.median_ms:.2f}", f"{row.tokens_per_second:.1f}"
        )


def _model(facts: dict[str, Any]) -> str:
    return (
        f"{facts['model']} ({facts['n_params'] / 1e6:,.0f} M parameters), compute "
        f"{facts['compute']}, {facts['device']}, {facts['threads']} threads"
    )


def _mib(n_bytes: int) -> str:
    if n_bytes == 0:
        return "0"
    mib = n_bytes / 2**20
    return f"{mib:.2f}" if mib >= 0.01 else "<0.01"
