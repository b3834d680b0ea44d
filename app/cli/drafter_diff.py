"""`draftscope drafter-diff`: one target and one drafter in two engines, and the cause of different
drafts or acceptance."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.acceptance import drafted_run
from app.cli.common import connect, draft_paths, open_session
from app.cli.option_lines import refuse_given
from app.cli.output import print_report
from app.cli.recorded import record
from app.cli.run_arguments import options_from
from engine.errors import OptionError
from engine.observe.server.reply import TimeLimits
from engine.options import Prompt, RunOptions, SamplerOptions, SpecOptions
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from resources import DEMO_TARGET

if TYPE_CHECKING:
    import numpy as np

    from engine.observe.drafter_diff.stage_values import StageValues
    from engine.session import Session

_OURS = "run"
"""A source: this engine with the given model and drafter, or another copy of it."""
_LLAMA = "llama.cpp"
"""A source: a llama.cpp library with the same files."""
_URLS = ("http://", "https://")
_N_PREDICT = 128


def run(args: argparse.Namespace) -> int:
    """Open or record both sides, compare, print."""
    sources = args.source_a, args.source_b
    live = [_is_here(source) or source.startswith(_URLS) for source in sources]
    if all(live) and args.prompt is None:
        raise OptionError(
            "Both have to be decoded, without a prompt.", "Give one with -p, or name a trace."
        )
    if args.demo and args.model is None:
        args.model = DEMO_TARGET
    refuse_given(args, "a recorded run", *compress(("--run-a", "--run-b"), live))
    if not any(live):
        refuse_given(args, "a run that is decoded now", "-p", "--prompt")
    if not any(source.startswith(_URLS) for source in sources):
        refuse_given(args, "the address of a server", "+connection")
    if args.model is None:
        refuse_given(args, "--model", "+compute", *(() if any(live) else ("--spec-type",)))
    recorded = {
        i: drafted_run(Path(source), number, option, or_sums=True)
        for i, (source, number, option) in enumerate(
            zip(sources, (args.run_a, args.run_b), ("--run-a", "--run-b"), strict=True)
        )
        if not live[i]
    }
    session = _session(args)
    other = next(iter(recorded.values()), None)
    refs, handed, values = zip(
        *(
            (recorded[i], None, None) if i in recorded else _decoded(args, source, session, other)
            for i, source in enumerate(sources)
        ),
        strict=True,
    )
    from engine.observe.drafter_diff.diff import drafter_diff, lines_of

    found = drafter_diff(refs[0], refs[1], session, handed=handed, values=values)
    print_report(
        args,
        {"first": asdict(found.first) if found.first else None, **asdict(found)},
        lines_of(found),
    )
    return int(found.first is not None)


def _is_here(source: str) -> bool:
    """Whether this machine decodes it now, with --model."""
    return source.partition("=")[0] in (_OURS, _LLAMA)


def _session(args: argparse.Namespace) -> Session | None:
    if args.model is None:
        if args.spec_draft_model or any(map(_is_here, (args.source_a, args.source_b))):
            raise OptionError("The target is missing.", "Name it with --model, or use --demo.")
        return None
    there = draft_paths(args)
    if args.demo and not args.spec_draft_model and args.spec_type:
        there = {name: path for name, path in there.items() if name in args.spec_type}
    return open_session(args, args.model, list(there.values()))


def _decoded(
    args: argparse.Namespace, source: str, session: Session | None, other: RunRef | None
) -> tuple[RunRef, np.ndarray | None, StageValues | None]:
    """The other run's prompt, or the given one, decoded now with that run's options; also the rows
    that the target passed to its drafter, and the drafters' values, as far as known."""
    options, prompt = _as(args, session, other)
    store = TraceStore()
    if source.startswith(_URLS):
        from engine.observe.server.request_options import RequestOptions, request_for
        from engine.observe.server.server_run import ServerRun

        client, facts = connect(source, args.api_key_env, options_from(args, TimeLimits))
        with client:
            what = prompt.tokens or prompt.text
            request = request_for(client, facts, what, options, RequestOptions(), None)
            asked = ServerRun(client, facts, [request], store)
            record(asked, asked.advance, None)
        return RunRef(store, asked.run_id), None, None
    assert session is not None
    if source == _OURS:
        job = session.start([prompt], options, store)
        record(job, job.advance, None)
        return RunRef(store, job.run_id), None, None
    kind, _, folder = source.partition("=")
    drafts = draft_paths(args)
    if kind == _OURS:
        from engine.observe.drafter_diff.other_copy import decode_with_copy

        models = [args.model, *dict.fromkeys(drafts.values())]
        run, values = decode_with_copy(Path(folder), models, session.compute, prompt, options)
        return run, None, values
    from engine.observe.drafter_diff.llama_source import decode_with_llama

    (name,) = options.spec.types[-1:] or ("",)
    build = Path(folder) if folder else None
    return *decode_with_llama(session, build, prompt, options, store, drafts.get(name)), None


def _as(
    args: argparse.Namespace, session: Session | None, other: RunRef | None
) -> tuple[RunOptions, Prompt]:
    """Options and prompt for decoding, those of the other run if known."""
    from engine.observe.drafter_diff.sides import sides_of

    options, prompt = RunOptions(n_predict=_N_PREDICT), None
    types = tuple(args.spec_type or ())
    if other is not None:
        side = sides_of("the recorded run", other, session)[0]
        own = other.facts.options
        temp = float(side.setting.get("temperature", 0.0) or 0.0)
        options = RunOptions(
            n_predict=max(1, len(side.ids)),
            sampler=own.sampler if own else SamplerOptions(temp=temp),
            ignore_eos=own.ignore_eos if own else False,
        )
        if side.prompt:
            prompt = Prompt(side.prompt, side.asked.prompt or "")
        elif side.asked.prompt is not None:
            prompt = Prompt((), side.asked.prompt)
        if session is not None and not types:
            from engine.observe.drafter_diff.redraft import drafter_for

            types = (drafter_for(session, side),)
        n_max = max((draft.n_drafted for draft in side.drafts), default=SpecOptions().n_max)
        spec = own.spec if own else SpecOptions(types=types, n_max=min(n_max, 64))
        if own is None:  # as far as a log contains it
            n_min = min(int(side.limits.get("n_min", 0)), spec.n_max)
            spec = replace(spec, n_min=n_min, p_min=side.limits.get("p_min", 0.0))
        options = replace(options, spec=replace(spec, types=types or spec.types))
    elif session is not None:
        types = types or session.drafters[-1:]
        options = replace(options, spec=SpecOptions(types=types))
    if args.prompt is not None:
        prompt = session.prompt(args.prompt) if session else Prompt((), args.prompt)
    if prompt is None:
        raise OptionError("The recorded run has no prompt.", "Give it with -p.")
    if not prompt.tokens and session is not None:
        prompt = session.prompt(prompt.text)
    return options, prompt
