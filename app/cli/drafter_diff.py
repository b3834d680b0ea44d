"""`draftscope drafter-diff`: one target and one drafter in two engines, and what makes their drafts
or their acceptance differ."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.acceptance import drafted_run
from app.cli.common import add_compute, connect, draft_paths, open_session
from app.cli.option_lines import OptionLines, refuse_given
from app.cli.output import print_report
from app.cli.recorded import record
from app.cli.rescore import add_connection
from app.cli.run_arguments import add_drafters, options_from
from engine.errors import OptionError
from engine.observe.server.reply import TimeLimits
from engine.options import Prompt, RunOptions, SamplerOptions, SpecOptions
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from resources import DEMO_TARGET

if TYPE_CHECKING:
    import numpy as np

    from engine.observe.drafter_diff.diff import DrafterDiff, PairDiff
    from engine.observe.drafter_diff.records import Cause, Counts
    from engine.observe.drafter_diff.stage_values import StageValues
    from engine.session import Session

_OURS = "run"
"""A source: this engine, with the model and drafter at hand, or another copy of it."""
_LLAMA = "llama.cpp"
"""Another: a build of llama.cpp as a library, with the same files."""
_URLS = ("http://", "https://")
_N_PREDICT = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "draftscope drafter-diff A B [--model MODEL [-md DRAFT]] [options]"
    parser.add_argument_group(
        "what is compared",
        "A and B are each a trace, a capture, a log or a record with token ids, the address of a\n"
        f"llama-server, `{_OURS}` for this engine, `{_OURS}=FOLDER` for another copy of it (every\n"
        "value that its drafters compute is held against this engine's), or\n"
        f"`{_LLAMA}[=BUILD]` for llama.cpp as a library (a build, or an installed package; two of\n"
        "them compare two builds). Prompts,\n"
        "tokens and special tokens are held against each other first, then drafts after the\n"
        "same text, the rule that accepts them and counts. With the model and drafter,\n"
        "every draft is made again, and where drafts are not the drafter's own, one stage after\n"
        "the other is changed until one gives them, or most of them.",
    )
    parser.epilog = (
        "exit status: 0 no cause, 1 one was found, 2 wrong usage, or a fact that is missing\n\n"
        "examples:\n"
        "  draftscope drafter-diff ours/ server.log --model model.gguf -md eagle3.gguf\n"
        f"  draftscope drafter-diff {_OURS} http://127.0.0.1:8080 -p 'def f(' --model model.gguf"
    )
    model = OptionLines(parser).add(
        f"""
        source_a=A  trace, file, address, `{_OURS}` or `{_LLAMA}`
        source_b=B  trace, file, address, `{_OURS}` or `{_LLAMA}`
        model and drafter
          -m, --model FILE  GGUF file of the target
          --demo  use the bundled models
          -md, --spec-draft-model FILE  GGUF file of the drafter; an MTP head of the model needs
              none
        """,
        spec_draft_model={"action": "append"},
    )
    add_compute(model)
    runs = OptionLines(parser).add("""
        runs
          --run-a N:int  run of trace A (default: the first with drafts)
          --run-b N:int  run of trace B (default: the first with drafts)
          -p, --prompt TEXT  prompt of what is decoded now (default: that of the recorded one, A or
              B)
    """)
    add_drafters(runs, "{about}")
    add_connection(runs)
    OptionLines(parser).add("output\n  --json  print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Open or record both, compare, tell."""
    sources = args.source_a, args.source_b
    live = [_is_here(source) or source.startswith(_URLS) for source in sources]
    if all(live) and args.prompt is None:
        raise OptionError(
            "Both are decoded now and there is no prompt.", "Give one with -p, or name a trace."
        )
    if args.demo and args.model is None:
        args.model = DEMO_TARGET
    refuse_given(args, "a recorded run", *compress(("--run-a", "--run-b"), live))
    if not any(live):
        refuse_given(args, "a run that is decoded now", "-p", "--prompt")
    if not any(source.startswith(_URLS) for source in sources):
        refuse_given(args, "the address of a server", add_connection)
    if args.model is None:
        refuse_given(args, "--model", add_compute, *(() if any(live) else ("--spec-type",)))
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
    from engine.observe.drafter_diff.diff import drafter_diff

    found = drafter_diff(refs[0], refs[1], session, handed=handed, values=values)
    print_report(
        args,
        {"first": asdict(found.first) if found.first else None, **asdict(found)},
        _lines(found),
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
    """The prompt of the other run, or the one that was given, decoded now as that run was; rows
    that the target handed over, and what drafters computed, where these are known."""
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
    """Options and prompt to decode with, those of the other run as far as they are known."""
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
        if own is None:  # as far as a log says it
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


# -- output ------------------------------------------------------------------------------------


def _lines(found: DrafterDiff) -> Iterator[str]:
    first = found.first
    yield (
        f"first cause: {first.stage}{_of(first)}. {first.about}"
        if first
        else ("no cause: drafts, rule and counts agree as far as both are recorded")
    )
    for pair in found.pairs:
        yield from _pair_lines(pair)


def _pair_lines(pair: PairDiff) -> Iterator[str]:
    yield (
        f"sequences {pair.seq_a} and {pair.seq_b}: A accepted {_share(pair.counts_a)}, "
        f"B {_share(pair.counts_b)}, by chance with probability {pair.chance:.2g}"
    )
    yield f"  {pair.n_equal} of {pair.n_contexts} drafts after the same text are equal"
    for number, cause in enumerate(pair.causes, start=1):
        yield f"  {number}. {cause.stage}{_of(cause)}: {cause.about}"
        said = "; ".join(filter(None, (cause.place, cause.size)))
        if said:
            yield f"     {said}"
        if cause.recorded is not None and cause.mended is not None:
            yield f"     accepted {_share(cause.recorded)}; with it mended {_share(cause.mended)}"
    for sentence in pair.missing:
        yield f"  missing: {sentence}"


def _of(cause: Cause) -> str:
    return f" of {cause.side}" if cause.side else ""


def _share(counts: Counts) -> str:
    accepted, drafted = counts
    rate = f" ({accepted / drafted:.3f})" if drafted else ""
    return f"{accepted} of {drafted}{rate}"
