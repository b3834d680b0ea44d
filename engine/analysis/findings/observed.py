"""Rules about runs of other engines: what was seen while observing them, reported as facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from engine.analysis.findings.rule import ERROR, WARNING, Rule, RuleHit
from engine.analysis.findings.run_rows import ExaminedRun


def observed_hits(run: ExaminedRun, rule: str) -> Iterator[RuleHit]:
    """The first of a run's reported findings of a rule for each sequence."""
    found: dict[int | None, RuleHit] = {}
    for one in run.facts.observed_findings or ():
        if one.rule == rule:
            hit = RuleHit(one.round, one.seq_id, one.message, one.evidence)
            found.setdefault(one.seq_id, hit)
    yield from found.values()


def _told(rule: str) -> Callable[[ExaminedRun], Iterator[RuleHit]]:
    return partial(observed_hits, rule=rule)


RULES = (
    Rule(
        "counters-contradict",
        ERROR,
        "Counters contradict each other",
        "Figures of another engine cannot all be true: a counter fell, more was accepted "
        "than drafted, or sums differ. Rounds are derived from such counters, so nothing after the "
        "contradiction is shown.",
        "Check the build of the server, the rules were proven on llama.cpp 0c1e57098; of a record, "
        "check that no one has changed it.",
        _told("counters-contradict"),
    ),
    Rule(
        "counters-differ",
        WARNING,
        "Counters of the server differ",
        "The sums that the server keeps for all requests moved by more, or by less, than the "
        "replies to these requests reported. Another client may have used the server meanwhile; "
        "otherwise one of the two is wrong.",
        "Send the requests again to a server that no one else uses.",
        _told("counters-differ"),
    ),
    Rule(
        "log-of-another-run",
        WARNING,
        "Log of another run",
        "The log does not tell the rounds that the streams reported, so it was not joined to them.",
        "Name the log that the same server wrote while these requests ran.",
        _told("log-of-another-run"),
    ),
    Rule(
        "log-lines-missing",
        WARNING,
        "Lines of the log are missing",
        "Tokens go on with a gap in their numbers, or the rounds in the log are not all that the "
        "server's own sums count: lines were filtered, or the log was cut. Nothing is wrong with "
        "the server's counting; sums are its own, rounds and rates by round are of what is left.",
        "Name the whole log, without grep.",
        _told("log-lines-missing"),
    ),
    Rule(
        "log-unread",
        WARNING,
        "Lines of the log are not read",
        "Lines look like those that tell rounds or sums and are not read, or numbers in them are "
        "none, or larger than a server can mean: more than 1,024 drafted tokens, more accepted "
        "than drafted, a position beyond any context. Of a request with such a number nothing "
        "after it is shown.",
        "Name the log as the server wrote it; the evidence has the first line.",
        _told("log-unread"),
    ),
    Rule(
        "not-recorded",
        WARNING,
        "Passed but not recorded",
        "What other programs asked and got through the proxy is not in the trace as a whole. "
        "They were served all the same.",
        "Do not pause the run for long while other programs use the server.",
        _told("not-recorded"),
    ),
    Rule(
        "stream-cut",
        WARNING,
        "Stream cut short",
        "The reply ended before the answer was complete: the server stopped, the connection was "
        "lost, or an error was sent inside the stream. Its last round may lack tokens.",
        "See whether the server still runs, and send the request again.",
        _told("stream-cut"),
    ),
    Rule(
        "stream-unreadable",
        WARNING,
        "Stream cannot be read",
        "The reply holds something that no llama-server sends, such as a line without an end or a "
        "counter that is not a number. It was read up to there.",
        "Check that the address is that of a llama-server and not of another program.",
        _told("stream-unreadable"),
    ),
)
