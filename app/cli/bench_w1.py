"""`draftscope bench w1`: a conversation of four turns with a growing history, counters per turn."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from app.cli.bench_requests import declare_requests, deliver, open_bench, progress, report_of
from app.cli.run_arguments import cache_options
from engine.errors import OptionError
from engine.experiments.bench.request import Workload, turn_counters, turn_totals
from resources import CONVERSATIONS

_LINE = "{:<12} {:>7} {:>7} {:>9} {:>7} {:>7} {:>7} {:>8} {:>8} {:>8} {:>6} {:>7}"
_HEADS = "turn prompt cached processed tokens drafts drafted accepted rejected restores dupl. tok/s"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare_requests(parser, __name__)


def run(args: argparse.Namespace) -> int:
    """Run the conversation in every configuration; print and write the finished part."""
    cached = cache_options(args)
    set_name, messages, session, configurations = open_bench(args, CONVERSATIONS)
    if args.chat and session.chat is None:
        raise OptionError("The model has no chat template.", "Leave out --chat.")
    from engine.decode.held_sequences import PromptCache

    conversations = [
        Workload(
            session,
            messages,
            configuration,
            chat=args.chat,
            template_values=args.chat_template_kwargs,
            cache=PromptCache(cached) if cached else None,
        )
        for configuration in configurations
    ]
    n_done, n_all = 0, len(conversations) * len(messages)
    try:
        for conversation in conversations:
            for turn in conversation.turns():
                n_done += 1
                name = conversation.configuration.name
                progress(n_done, n_all, f"{turn.prompt}, {name}: {turn.predicted_n} tokens")
    finally:
        if n_done:
            turns = [_facts(one, conversations[0]) for one in conversations]
            known = {"cache": asdict(cached) if cached else None, "configurations": turns}
            report = report_of("w1", n_done == n_all, args, session, set_name, **known)
            deliver(args, report, _lines(report))
    return 0


def _facts(one: Workload, plain: Workload) -> dict[str, Any]:
    turns = [turn_counters(turn) for turn in one.done]
    pairs = zip(one.done, plain.done, strict=False)
    return {
        "name": one.configuration.name,
        "options": asdict(one.configuration.options),
        "turns": turns,
        "totals": turn_totals(turns),
        "num_same": sum(turn.text == other.text for turn, other in pairs),
    }


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for one in report["configurations"]:
        if not one["turns"]:
            continue
        yield ""
        same = f"{one['num_same']} of {len(one['turns'])} answers are the same as in plain decoding"
        yield f"{one['name']}: {same}"
        yield _LINE.format(*_HEADS.split())
        for turn in one["turns"]:
            counters = (turn[name] for name in one["totals"])
            yield _LINE.format(turn["turn"], *counters, f"{turn['tokens_per_second']:.1f}")
        yield _LINE.format("all", *one["totals"].values(), "")
    yield ""
    yield ("drafts: verification steps; dupl.: most duplicate KV cells after a round")
    if not report["complete"]:
        yield "not complete: the workload was stopped"
