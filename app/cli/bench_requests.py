"""Shared parts of `draftscope bench`: options, prompts, configurations, results."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.common import draft_paths, open_session, target_path
from app.cli.option_lines import declare, names_of, positive
from app.cli.output import print_json, print_lines, tell, write_json
from app.cli.run import draft_files
from app.cli.run_arguments import run_options
from engine.environment import environment
from engine.experiments.bench.prompts import NamedPrompt, default_set, read_prompts
from engine.experiments.bench.request import Configuration
from engine.machine.host_memory import wait_for_huge_pages
from engine.options import DRAFTERS, ROLLBACK_POLICIES, RunOptions
from engine.plain_text import counted

if TYPE_CHECKING:
    from engine.session import Session

DEFAULT_DRAFTERS = ("draft-mtp", "draft-simple", "ngram-mod")
"""Default drafters, as far as the model files allow."""


N_PREDICT = 192
"""Tokens per request, as in llama.cpp #22400."""
REPEAT = 7
"""Repetitions of measurements that take milliseconds."""
_MOST_REPEATS = 1000


def _repeat(text: str) -> int:
    number = positive(text)
    if number > _MOST_REPEATS:
        raise argparse.ArgumentTypeError(f"{number} is above {_MOST_REPEATS}")
    return number


REPEATED: dict[str, Any] = {
    "policies": names_of(ROLLBACK_POLICIES, or_all=True),
    "all_policies": tuple(ROLLBACK_POLICIES),
    "repetitions": _repeat,
    "repeat": REPEAT,
}
"""Values for the names in the pages of measurements; see `declare`."""


def declare_requests(parser: argparse.ArgumentParser, module: str, **given: Any) -> None:
    """Declare the page of a measurement that decodes prompts; see `declare`."""
    parser.set_defaults(out=None, repeat=None)  # for pages without these
    declare(parser, module, **REPEATED, **given)
    parser.set_defaults(n_predict=N_PREDICT, parallel=1)


def prompt_set(args: argparse.Namespace, sets: Mapping[str, Path]) -> tuple[str, list[NamedPrompt]]:
    """The chosen set or file: its name and prompts. Raises OptionError."""
    name = set_name(args, sets)
    return name, read_prompts(sets[name] if name in sets else Path(name))


def set_name(args: argparse.Namespace, sets: Mapping[str, Path]) -> str:
    """The chosen set, or path of a file; with --demo, --ignore-eos is set unless it is the demo's
    own set."""
    name: str = args.prompts or default_set(sets, on_demo=args.demo)
    # the demo model ends most other texts after a few tokens, too few for a measurement
    args.ignore_eos = args.ignore_eos or (args.demo and name != "demo")
    return name


def open_bench(
    args: argparse.Namespace, sets: Mapping[str, Path]
) -> tuple[str, list[NamedPrompt], Session, list[Configuration]]:
    """Check the options and load the model files: the prompt set's name and prompts, the session,
    and the configurations, plain decoding first.

    A configuration is a list of drafters with a policy, for chains and, with --spec-tree, for
    trees. With several policies only the first possible drafter is measured, unless --spec-type is
    given.
    """
    chosen_set, prompts = prompt_set(args, sets)
    target = target_path(args)
    names = dict.fromkeys([*DEFAULT_DRAFTERS, *draft_paths(args)])
    chosen: Sequence[tuple[str, ...]] = [(name,) for name in names]
    if args.spec_type is not None:
        chosen = list(dict.fromkeys(types for types in args.spec_type if types))
    all_options = _options(args, tuple(dict.fromkeys(name for types in chosen for name in types)))
    # without --spec-type, load all drafter files, given or bundled
    if args.spec_type is None:
        drafts = list(draft_paths(args).values())
    else:
        drafts = draft_files(args, all_options)
    session = open_session(args, target, drafts)
    wait_for_huge_pages()
    policies = args.rollback or (RunOptions().rollback,)
    if args.spec_type is None:
        chosen = [
            (name,) for (name,) in chosen if not DRAFTERS[name].needs or name in session.drafters
        ]
        chosen = chosen[: 1 if len(policies) > 1 else None]
    configurations = [Configuration.plain(_options(args, ()))]
    for types in chosen:
        for policy in policies:
            name = "+".join(types) + (f" {policy}" if len(policies) > 1 else "")
            configurations.append(Configuration(name, _options(args, types, policy)))
            if args.spec_tree and all(DRAFTERS[one].branches for one in types):
                name += f" tree {','.join(map(str, args.spec_tree))}"
                options = _options(args, types, policy, args.spec_tree)
                configurations.append(Configuration(name, options))
    return chosen_set, prompts, session, configurations


def facts(args: argparse.Namespace, session: Session, prompts: str) -> dict[str, Any]:
    """Facts at the head of a report: model, device, prompt set and machine.

    prompts: name of the set.
    """
    from engine.machine.device import device_name

    return {
        "model": session.identity,
        "compute": session.compute,
        "device": device_name(session.device),
        "prompts": prompts,
        "chat": args.chat,
        "environment": environment(),
    }


def report_of(
    kind: str, complete: bool, args: argparse.Namespace, session: Session, prompts: str, **own: Any
) -> dict[str, Any]:
    """A report: its kind, whether it is complete, the facts, and the results."""
    head = {"kind": f"draftscope bench {kind}", "version": 1, "complete": complete}
    return {**head, **facts(args, session, prompts), **own}


def progress(done: int, total: int, what: str) -> None:
    """Print on stderr how many of `total` steps are done, and a note."""
    tell(f"[{done:>{len(str(total))}}/{total}] {what}", "")


def deliver(args: argparse.Namespace, report: dict[str, Any], lines: Iterable[str] | None) -> None:
    """Print a report, as JSON or as a headline and lines, and write it to --out. lines: None prints
    nothing.

    Raises OptionError if it cannot be written.
    """
    if args.json:
        print_json(report)
    elif lines is not None:
        print_lines((_headline(args, report), *lines))
    if args.out is not None:
        write_json(args.out, report)


def _headline(args: argparse.Namespace, report: dict[str, Any]) -> str:
    """What was measured, in one line."""
    return (
        f"{report['model']['name']}, compute {report['compute']}, "
        f"{counted(report['environment']['threads'], 'thread')}, {report['prompts']} prompts, "
        f"-n {args.n_predict}, --temp {args.temp:g}, --seed {args.seed}"
    )


def _options(
    args: argparse.Namespace,
    types: tuple[str, ...],
    policy: str = RunOptions().rollback,
    tree: tuple[int, ...] = (),
) -> RunOptions:
    changes: dict[str, object] = {"spec_type": types, "rollback": policy, "spec_tree": tree}
    if not types:  # nothing to accept
        changes |= {"spec_synth_rates": (), "spec_synth_len": None}
    return run_options(argparse.Namespace(**{**vars(args), **changes}))
