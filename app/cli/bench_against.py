"""`draftscope bench against`: this engine and llama.cpp on the same file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from app.cli.bench_requests import N_PREDICT, progress, prompt_set
from app.cli.common import open_session, target_path
from app.cli.option_lines import declare
from app.cli.output import print_report
from app.cli.run_arguments import run_options
from engine.environment import environment
from engine.errors import OptionError
from engine.gguf.file import GgufFile
from engine.machine.host_memory import wait_for_huge_pages
from engine.model.info import describe
from engine.options import RunOptions
from engine.plain_text import size_text
from engine.report.parts import ReportTable
from engine.report.text import table_lines
from resources import SUITES

_N_PAIRS = 5
_WIDTHS = (4, 8)
_N_PROMPT = 512
_LINE = "{:<20} {:>10} {:>10} {:>7} {:>13} {:>7}"
_HEADS = ("tokens/s", "llama.cpp", "draftscope", "ratio", "min to max", "p")
_BUSY = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, __name__, pairs=_N_PAIRS)
    parser.set_defaults(against="", depth=0)
    parser.set_defaults(n_predict=N_PREDICT, ignore_eos=True, spec_default=False)


def run(args: argparse.Namespace) -> int:
    """Measure and print; after Ctrl-C, the finished part."""
    if args.markdown and args.json:
        raise OptionError("--markdown and --json are both given.", "Leave one of them out.")
    target = target_path(args)
    if args.device not in ("auto", "cpu"):
        raise OptionError("llama.cpp is compared only on the CPU.", "Leave --device out.")
    if args.n_predict < 1:
        raise OptionError(f"-n {args.n_predict} is not a number of tokens.", "Use 1 or more.")
    args.device = "cpu"
    if args.spec_type not in (None, [()], [("draft-mtp",)]):
        raise OptionError("The request drafts with draft-mtp.", "Name it, or none.")
    _, prompts = prompt_set(args, SUITES)
    options = _options(args)
    has_head = _has_head(args, target)
    session = open_session(args, target)
    from engine.experiments.bench.against_llama_cpp import Against, memory_copy_rate, pass_works
    from engine.experiments.bench.llama_programs import SpeculativeWork

    wait_for_huge_pages()
    speculative = None
    if has_head:
        prompt = session.prompt(prompts[0].text)
        n_ctx = session.context([prompt], options)
        rates = options.spec.synthetic
        speculative = SpeculativeWork(prompt.tokens, args.n_predict, rates, n_ctx)
    works = pass_works(_WIDTHS, _N_PROMPT, args.depth)
    folder = Path(args.against) if args.against else None
    against = Against(session, folder, works, speculative, options, args.pairs)
    facts = {
        "model": session.identity,
        "compute": session.compute,
        "memory_copy_bytes_per_second": memory_copy_rate(),
        "environment": environment(),
        "depth": args.depth,
        "speculation": None if speculative is None else asdict(speculative),
    }
    n_done = 0
    try:
        for name in against.steps():
            n_done += 1
            progress(n_done, against.n_steps, name)
    finally:
        if n_done:
            report = {
                "kind": "draftscope bench against",
                "version": 1,
                "complete": n_done == against.n_steps,
                **facts,
                "llama_cpp": against.build,
                "idle_share": against.idle_share,
                "rows": [{"work": name, **row} for name, row in against.rows().items()],
                "pairs": {name: list(map(asdict, pairs)) for name, pairs in against.pairs.items()},
                "acceptance": against.acceptance,
                "memory_bytes": against.memory,
            }
            print_report(args, report, _lines(report, markdown=args.markdown))
    return 0


def _has_head(args: argparse.Namespace, target: Path) -> bool:
    """Whether speculation is compared: the model has an MTP head, and `none` was not given. Raises
    OptionError if the trained context is too short for --depth."""
    with GgufFile.open(target) as file:
        info = describe(file)
    if info.n_ctx_train <= args.depth + _N_PROMPT:
        raise OptionError(
            f"--depth {args.depth} and a prompt of {_N_PROMPT} tokens are more than the trained "
            f"context of {info.n_ctx_train}.",
            "Lower it.",
        )
    return args.spec_type != [()] and any(layer.kind == "mtp" for layer in info.layers)


def _options(args: argparse.Namespace) -> RunOptions:
    """Options of the request; by default two thirds of every draft are accepted, so that both sides
    do the same work deterministically."""
    rates = args.spec_synth_rates
    if not rates and args.spec_synth_len is None:
        n_accepted = round(2 * args.spec_draft_n_max / 3)
        rates = tuple(float(i < n_accepted) for i in range(args.spec_draft_n_max))
    changes = {"spec_type": ("draft-mtp",), "spec_synth_rates": rates}
    return run_options(argparse.Namespace(**{**vars(args), **changes}))


def _lines(report: dict[str, Any], *, markdown: bool) -> Iterator[str]:
    """What was measured, the table, and how to read it."""
    machine = report["environment"]
    gigabytes = report["memory_copy_bytes_per_second"] / 1e9
    yield (
        f"{report['model']['name']} ({size_text(report['model']['size'])}), compute "
        f"{report['compute']}, threads of each side: {machine['threads']}"
    )
    yield f"{machine['processor']}, whose memory copies {gigabytes:.1f} GB/s (read and written)"
    yield f"draftscope {machine['draftscope']}, llama.cpp {report['llama_cpp']}"
    yield ""
    cells = [_HEADS, *(_cells(row) for row in report["rows"])]
    if markdown:
        yield from table_lines(ReportTable(_HEADS, cells[1:]))
    else:
        yield from (_LINE.format(*line) for line in cells)
    yield ""
    yield from _notes(report)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["work"],
        f"{row['theirs']:.1f}",
        f"{row['ours']:.1f}",
        f"{row['ratio']:.2f}",
        f"{row['low']:.2f} to {row['high']:.2f}",
        f"{row['p']:.3f}",
    )


def _notes(report: dict[str, Any]) -> Iterator[str]:
    n = report["rows"][0]["n_pairs"]
    yield f"Medians of {n} alternating pairs; ratio: median of the pairs' ratios, p: sign test."
    yield (
        "1 token and prompt: llama-bench; verify: llama-bench with -embd 1, which computes the "
        "logits of every token, as here."
    )
    if report["depth"]:
        yield f"All with {report['depth']} tokens in the context."
    if report["acceptance"]:
        rates = ",".join(f"{rate:g}" for rate in report["speculation"]["rates"])
        theirs, ours = (median(side) for side in zip(*report["acceptance"], strict=True))
        yield (
            f"draft-mtp: one greedy request of {report['speculation']['n_predict']} tokens to "
            f"llama-server and here, both with --spec-synth-rates {rates}: accepted "
            f"{theirs:.2f} there, {ours:.2f} here."
        )
        yield "better: the same, compared with llama.cpp's plain decoding where that is faster."
    if report["memory_bytes"]:
        theirs, ours = report["memory_bytes"]
        yield (
            f"Resident memory, largest: llama-server {theirs / 2**20:.0f} MiB, here "
            f"{ours / 2**20:.0f}, ratio {ours / theirs:.2f}."
        )
    if report["idle_share"] > _BUSY:
        yield (
            f"While llama.cpp was measured, this process used {100 * report['idle_share']:.0f} % "
            "of a core, so its figures may be too low: check whether OMP_WAIT_POLICY is set."
        )
    if not report["complete"]:
        yield "not complete: the measurement was stopped"
