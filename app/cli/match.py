"""`draftscope match`: the same prompts one by one and in parallel, as a table and a verdict."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from app.cli.bench_requests import facts, prompt_set
from app.cli.common import draft_paths, open_session, target_path
from app.cli.option_lines import declare
from app.cli.output import print_report, tell
from app.cli.run import draft_files, make_prompt
from app.cli.run_arguments import run_options
from resources import MATCHES

if TYPE_CHECKING:
    from engine.experiments.bench.match import MatchResult, MatchStep, MatchTest
    from engine.session import Session

_N_PREDICT = 256
_SLOTS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, __name__)
    parser.set_defaults(n_predict=_N_PREDICT, parallel=_SLOTS)


def run(args: argparse.Namespace) -> int:
    target = target_path(args)
    set_name, named = prompt_set(args, MATCHES)
    if args.spec_type is None:
        args.spec_type = tuple(draft_paths(args)) if args.spec_draft_model else ("draft-mtp",)
    options = run_options(args)
    drafts = draft_files(args, options)
    kinds = [kind.strip() for kind in args.steps.split(",")]
    session = open_session(args, target, drafts)
    from engine.experiments.bench.match import MatchTest

    prompts = [(prompt.name, make_prompt(session, args, prompt.text)) for prompt in named]
    test = MatchTest(session, prompts, options, kinds)
    for step in test.steps():
        tell(f"{step.lane} {step.kind} {step.step + 1}: {step.seconds:.2f} s", "")
    passed = test.passed and not (args.exact and test.differing)
    print_report(
        args,
        {
            "passed": passed,
            "all_match": not test.differing,
            "steps": [asdict(step) for step in test.done],
            "options": asdict(options),
            **facts(args, session, set_name),
        },
        (*_lines(test, session), _verdict(test, passed)),
    )
    return 0 if passed else 1


def _lines(test: MatchTest, session: Session) -> Iterator[str]:
    for step in test.done:
        base = ", the reference for the others" if step.is_baseline else ""
        yield f"{step.lane}, step {step.step + 1} ({step.kind}): {step.seconds:.2f} s{base}"
        for result in step.results:
            yield f"  {result.prompt:<18} {_outcome(result, step, session)}"
    yield ""


def _outcome(result: MatchResult, step: MatchStep, session: Session) -> str:
    """MATCH with the length, or where and how the texts diverge."""
    difference, is_control = result.difference, step.lane == "control"
    if difference is None:
        word = "stored" if step.is_baseline else "MATCH"
        return f"{word} ({result.n_characters} characters, {result.n_tokens} tokens)"

    def shown(token: int | None) -> str:
        return "the end" if token is None else f"{token} {session.tokenizer.decode([token])!r}"

    line = (
        f"DIFFERS at token {difference.index}: {shown(difference.got)} instead of "
        f"{shown(difference.expected)}"
    )
    if difference.top2_gap is not None:
        line += f", top-2 gap {difference.top2_gap:.2g}"
    if result.width is not None:
        tie = "a near tie" if result.width.is_tie else "no tie"
        line += f", their logits differ by {result.width.gap:.2g}, the width changes them by up to "
        line += f"{result.width.noise:.2g}: {tie}"
    return line + ("; the control differs too" if result.in_control and not is_control else "")


def _verdict(test: MatchTest, passed: bool) -> str:
    if not test.differing:
        return "pass: all texts are the same"
    if not passed and test.options.batch_invariant:
        return "fail: a text differs although the batch width cannot change it"
    if not test.passed:
        return "fail: a text differs at a place that the batch width does not explain"
    return (
        f"{'pass' if passed else 'fail'}: texts differ only where the batch width changes them "
        "without speculation too"
    )
