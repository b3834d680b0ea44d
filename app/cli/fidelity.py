"""`draftscope fidelity`: distance of the compute modes from f32, as a table."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from msgspec import to_builtins

from app.cli.common import check_files, loading_line, target_path
from app.cli.option_lines import declare, names_of, read_text
from app.cli.output import note, print_report
from engine.errors import OptionError
from engine.options import COMPUTE_MODES
from resources import demo_prompts

if TYPE_CHECKING:
    from engine.trace.facts import FidelityFacts

# modes that round weights or activations, which blocks does not
_MODES = ("bf16", "int8", "int8x2", "q8")
_N_TOKENS = 256
_MOST_TOKENS = 4096  # more hardly changes the means, and both modes' logits are in memory
_LINE = "{:<8}{:>12}{:>12}{:>12}{:>14}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    modes = names_of([mode for mode in COMPUTE_MODES if mode != "auto"])
    declare(
        parser, __name__, modes=modes, usual=",".join(_MODES), most=_MOST_TOKENS, n_tokens=_N_TOKENS
    )


def run(args: argparse.Namespace) -> int:
    if args.n_predict > _MOST_TOKENS:
        raise OptionError(f"-n is above {_MOST_TOKENS}.", "Use fewer; more do not improve it.")
    path = target_path(args)
    text = args.prompt or (read_text(args.file) if args.file else demo_prompts()[0])
    check_files(path)
    from engine.compare.divergence import greedy_text, measure_fidelity
    from engine.session import Session
    from engine.threads import use_threads

    reference = Session.open(path, compute="f32", progress=loading_line())
    use_threads(args.threads, reference.info)
    tokens = greedy_text(reference, text, args.n_predict)
    n_found = len(tokens) - len(reference.prompt(text).tokens)
    if n_found < args.n_predict:
        note(f"the context has room for only {n_found} more tokens.")
    found = []
    for mode in args.modes:
        session = Session.open(path, compute=mode, progress=loading_line())
        found.append(measure_fidelity(session, reference, tokens))
    title = f"{path.name}: against f32 over {len(tokens) - 1} tokens"
    heads = _LINE.format("mode", "NMSE", "KL, nats", "same top-1", "worst logit")
    report = {"model": str(path), "modes": [to_builtins(one) for one in found]}
    print_report(args, report, (title, "", heads, *map(_line, found)))
    return 0


def _line(one: FidelityFacts) -> str:
    share = f"{100 * (one.top1 or 0.0):.1f} %"
    return _LINE.format(
        one.compute, f"{one.nmse:.2e}", f"{one.kl:.2e}", share, f"{one.max_abs:.2e}"
    )
