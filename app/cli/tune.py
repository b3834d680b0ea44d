"""`draftscope tune`: whether to speculate, with which drafter and draft length, for this model,
machine and prompts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from app.cli.bench_requests import set_name
from app.cli.common import api_key, draft_paths, open_session, target_path
from app.cli.option_lines import declare, refuse_given
from app.cli.output import in_columns, print_lines, tell, write_json
from app.cli.recorded import check_folder, deliver_report
from app.cli.run import make_prompt
from app.cli.run_arguments import options_from
from engine.environment import environment
from engine.errors import OptionError
from engine.experiments.bench.prompts import NamedPrompt, choose, read_prompts
from engine.experiments.results.table import RESULTS_FILE
from engine.experiments.tune.lengths import LOOK_UPS, has_floor, has_length
from engine.option_fields import grouped
from engine.options import Prompt, RunOptions, SpecOptions
from engine.report.parts import CODE, Remark, Report, ReportTable
from engine.trace.replacing import check_room
from resources import SUITES

if TYPE_CHECKING:
    from engine.experiments.tune.confirm import Confirmed
    from engine.experiments.tune.on_server import ServerTuned
    from engine.experiments.tune.record import TunePlan
    from engine.experiments.tune.tune import GridCheck, SettingError
    from engine.session import Session


N_PREDICT = 64
PLAIN = "plain"
_SERVER_N = 512
"""Most tokens of a server's reply, unless -n is given."""
PAIRS = 6
_ASKED = ("n_predict", "seed", "ignore_eos")
"""Decoding options that also apply to a measured server."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # seed and n_predict stay unset: no seed takes the first prompts, a server gets more tokens
    decoding = [
        replace(one, default=N_PREDICT) if one.field == "n_predict" else one
        for one in grouped(RunOptions, "decoding")
    ]
    declare(parser, __name__, look_ups=LOOK_UPS, pairs=PAIRS, running=_running, decoding=decoding)
    fields = dict.fromkeys(("prompt_field", "name_field", "category_field"), "")
    parser.set_defaults(server="", running={}, **fields)


def _running(text: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in text.split(",")]
    if not all(name and url for name, _, url in pairs):
        raise argparse.ArgumentTypeError("write NAME=URL, several separated by commas")
    return {name: url for name, _, url in pairs}


_OF_MODELS = (
    *("--model", "-m", "--trials", "--check-simulator", "--check-grid", "--out"),
    *("+compute", "+chat", "@unasked", "@sizes", "@rollback", "+report"),
)
"""Options without effect on a server."""


def _tune_server(args: argparse.Namespace) -> int:
    """Measure a server's settings; print and write the results."""
    from engine.experiments.tune.on_server import ServerPlan, tune_server

    if args.server and args.running:
        raise OptionError("--server and --running are both given.", "Leave one of them out.")
    if args.model is not None:
        raise OptionError("A model and a server are both given.", "Leave one of them out.")
    unasked = [one for one in grouped(RunOptions, "decoding") if one.field not in _ASKED]
    refuse_given(args, "MODEL", *_OF_MODELS, unasked=unasked)
    if not args.running and not args.spec_type:
        raise OptionError(
            "The drafters of the server are not known.",
            "Name them with --spec-type, such as draft-mtp or ngram-mod.",
        )
    if max(args.lengths) > 64:
        raise OptionError(f"--lengths has one above {64}.", "Leave it out.")
    _check_drafters(args)
    args.limit = args.limit or 4
    plan = ServerPlan(
        [one.text for one in _prompts(args)],
        args.server,
        args.running,
        args.spec_type or (),
        sorted(args.lengths),
        files={name: str(path) for name, path in draft_paths(args).items()},
        key=api_key(args.api_key_env),
        rates=args.spec_synth_rates or (),
        n_predict=args.n_predict or _SERVER_N,
        pairs=max(args.pairs, PAIRS),
        most_s=args.budget,
        ignore_eos=bool(args.ignore_eos),
        kept=args.keep,
    )
    found = tune_server(plan, tell)
    with_texts = not plan.rates and all(one.n_prompts for one in found.confirmed)
    print_lines(_server_lines(found, with_texts))
    if args.json is not None:
        data = asdict(found) | {"kind": "draftscope tune --server", "command": args.server}
        write_json(args.json, data)
    return 0 if found.verdict.chosen else 1


def _server_lines(found: ServerTuned, with_texts: bool) -> Iterator[str]:
    """Result lines. with_texts: say how many texts equal those without drafts."""
    width = max(map(len, found.screened))
    yield f"measured once, with {found.n_predict} tokens per prompt:"
    for name, (speed, rate) in found.screened.items():
        accepted = "" if rate is None else f"  acceptance {rate:.3f}"
        yield f"  {name:<{width}} {speed:>9.1f} tok/s{accepted}"
    if found.confirmed:
        yield "in alternation:"
    for one in sorted(found.confirmed, key=lambda one: -one.median):
        low, high = min(one.speeds), max(one.speeds)
        same = f", {one.same} of {one.n_prompts} texts as without drafts" if with_texts else ""
        yield f"  {one.name:<{width}} {one.median:>9.1f} tok/s ({low:.1f} to {high:.1f}){same}"
    yield from found.verdict.lines
    if found.verdict.chosen == PLAIN:
        yield "do not speculate"
    if found.flags is not None:
        engine, flags, missing = found.flags
        whose = "" if found.verdict.chosen else " of the fastest so far"
        yield f"flags{whose} for {engine}: {flags or 'none'}"
        yield from (f"  {words}" for words in missing)


def run(args: argparse.Namespace) -> int:
    """Record, simulate, confirm; print and write the results."""
    if args.server or args.running:
        return _tune_server(args)
    target = target_path(args)
    prompts = _prompts(args)
    plain = {"spec_type": (), "spec_synth_rates": (), "n_predict": args.n_predict or N_PREDICT}
    base = options_from(argparse.Namespace(**{**vars(args), **plain}), RunOptions)
    refuse_given(args, "--server or --running", "--lengths", "--budget", "--keep", "--api-key-env")
    check_folder(args.out, "--out", lambda out: check_room(out / RESULTS_FILE, (RESULTS_FILE,)))
    drafts = draft_paths(args)
    _check_drafters(args)
    if args.trials:
        from engine.experiments.tune.confirm import check_optuna, search

        check_optuna()
    session = open_session(args, target, list(drafts.values()))
    from engine.experiments.tune.record import TunePlan
    from engine.experiments.tune.report import findings, tune_report
    from engine.experiments.tune.tune import check_grid, chosen, tune

    texts = [make_prompt(session, args, one.text) for one in prompts]
    drafters = args.spec_type or (*session.drafters, *LOOK_UPS)
    files = {name: path.name for name, path in drafts.items()}
    pairs = PAIRS if args.check_simulator else args.pairs
    plan = TunePlan(prompts, base, drafters, pairs, args.spec_synth_rates, files)
    if args.check_simulator:
        check_simulator(args, session, plan, texts)
        return 0
    data = tune(session, plan, texts, tell)
    if args.trials:
        setting = chosen(data)
        options = plan.drafting(setting) if setting else plan.base
        data["trials"] = search(session, texts, options, args.trials, tell)
    printed = deliver_report(args, lambda command: tune_report(data, command))
    if not printed:
        print_lines(text_lines(findings(tune_report(data))))
    if args.check_grid:
        grid = check_grid(session, texts, plan, chosen(data), tell)
        data["grid"] = grid_data(grid)
        print_lines(("", *grid_lines(grid)))
    _write(args, data)
    return 0


def text_lines(report: Report) -> Iterator[str]:
    """A report for a terminal: headings, sentences, tables in columns; without plots."""
    yield f"{report.title}: {report.summary}"
    for section in report.sections:
        if not section.parts:
            continue
        yield ""
        yield f"{section.heading}:"
        for part in section.parts:
            if isinstance(part, ReportTable):
                rows = in_columns([part.heads, *part.rows], part.numeric)
                yield from (f"  {line}".rstrip() for line in rows)
            elif isinstance(part, Remark):
                indent = "    " if part.tone == CODE else "  "
                yield from (f"{indent}{line}" for line in part.text.splitlines())
            elif isinstance(part, Mapping):
                yield from (f"  {name}: {value}" for name, value in part.items())


def _prompts(args: argparse.Namespace) -> list[NamedPrompt]:
    name = set_name(args, SUITES)
    path = SUITES.get(name) or Path(name)
    fields = (args.prompt_field, args.name_field, args.category_field)
    return choose(read_prompts(path, fields), args.limit, args.seed)


def _check_drafters(args: argparse.Namespace) -> None:
    for name in SpecOptions(types=args.spec_type or ()).types:
        if not has_length(name):
            raise OptionError(f"{name} has no draft length to tune.", "Leave it out.")


def _write(args: argparse.Namespace, data: Mapping[str, Any]) -> None:
    if args.json is not None:
        write_json(args.json, data)
    if args.out is not None:
        from engine.experiments.tune.tune import write_results

        tell(f"results written to {write_results(data, args.out)}")


_HEADS = "{:<{width}}      tok/s  simulated   error    tok/round    simulated   error"
_LINE = "{:<{width}} {:>10.1f} {:>10.1f} {:>+5.1f} % {:>12.3f} {:>12.3f} {:>+5.1f} %"


def check_simulator(
    args: argparse.Namespace, session: Session, plan: TunePlan, texts: Sequence[Prompt]
) -> None:
    """Check the simulator by measurement; print, and write to --json. Covers drafters with a
    confidence floor."""
    from engine.experiments.tune.tune import simulator_error

    data: dict[str, Any] = {
        "kind": "draftscope simulator check",
        "version": 1,
        "model": session.identity,
        "environment": environment(),
        "options": asdict(plan.base),
        "drafters": {},
    }
    for drafter in filter(has_floor, plan.drafters):
        of_one = replace(plan, drafters=(drafter,))
        found = simulator_error(session, texts, of_one, args.pairs, tell)
        print_lines(check_lines(drafter, found))
        data["drafters"][drafter] = [asdict(one) for one in found]
    if args.json is not None:
        write_json(args.json, data)


def check_lines(drafter: str, found: Sequence[SettingError]) -> Iterator[str]:
    """One line per setting, the median errors, and the cost of following the simulator."""
    width = max(len(one.setting.name) for one in found)
    yield _HEADS.format(drafter, width=width)
    for one in found:
        yield _LINE.format(
            one.setting.name,
            median(one.real),
            median(one.simulated),
            100 * one.error,
            one.real_per_round,
            one.simulated_per_round,
            100 * one.error_per_round,
            width=width,
        )
    speed = median(abs(one.error) for one in found)
    per_round = median(abs(one.error_per_round) for one in found)
    yield f"median error: {100 * speed:.1f} % in speed, {100 * per_round:.1f} % in tokens per round"
    best = max(found, key=lambda one: median(one.real))
    chosen = max(found, key=lambda one: median(one.simulated))
    yield (
        f"fastest: {best.setting.name}; by the simulator: {chosen.setting.name}, which ran at "
        f"{100 * median(chosen.real) / median(best.real):.1f} % of the fastest"
    )


def grid_lines(found: GridCheck) -> Iterator[str]:
    """The finalists, fastest first, and the distance of the recommended one from the best."""
    width = max(len(one.name) for one in found.finalists)
    yield (f"grid of {len(found.settings)} settings; fastest and recommended ones, in pairs:")
    for one in sorted(found.finalists, key=lambda one: -one.median):
        low, high = min(one.speeds), max(one.speeds)
        mark = "  recommended" if one.name == found.chosen else ""
        yield f"  {one.name:<{width}} {one.median:>9.1f} tok/s ({low:.1f} to {high:.1f}){mark}"
    against = found.against_fastest
    words = "it is the fastest" if against is None else against.words
    yield f"recommended: {found.chosen}, at {100 * found.share:.1f} % of the fastest; {words}"


def grid_data(found: GridCheck) -> dict[str, Any]:
    """The same for a file."""

    def speeds(all_of: Sequence[Confirmed]) -> dict[str, list[float]]:
        return {one.name: list(one.speeds) for one in all_of}

    return {
        "chosen": found.chosen,
        "fastest": found.fastest.name,
        "share": found.share,
        "grid": speeds(found.grid),
        "finalists": speeds(found.finalists),
    }
