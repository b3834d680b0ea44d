"""The options of the sampler chain; names and defaults are llama.cpp's wherever it has them."""

from __future__ import annotations

import argparse

from app.cli.common import real
from engine.errors import OptionError
from engine.options import RunOptions, SamplerOptions
from engine.options.bias_text import parse_bias

_RUN, _SAMPLER = RunOptions(), SamplerOptions()


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """-n, the sampler chain, --ignore-eos and --allow-non-finite."""
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "-n",
        "--n-predict",
        type=int,
        default=_RUN.n_predict,
        metavar="N",
        help="tokens per sequence, -1 = no limit (default %(default)s)",
    )
    group.add_argument(
        "--temp",
        type=real,
        default=_SAMPLER.temp,
        metavar="T",
        help="temperature, 0 = greedy (default %(default)s)",
    )
    _add_penalties(group)
    group.add_argument(
        "--top-k",
        type=int,
        default=_SAMPLER.top_k,
        metavar="N",
        help="most probable tokens kept, 0 = all (default %(default)s)",
    )
    group.add_argument(
        "--typical",
        "--typical-p",
        dest="typical_p",
        type=real,
        default=_SAMPLER.typical_p,
        metavar="P",
        help="probability mass of locally typical tokens kept, 1 = all (default %(default)s)",
    )
    group.add_argument(
        "--top-p",
        type=real,
        default=_SAMPLER.top_p,
        metavar="P",
        help="probability mass kept, 1 = all (default %(default)s)",
    )
    group.add_argument(
        "--min-p",
        type=real,
        default=_SAMPLER.min_p,
        metavar="P",
        help="least probability kept, relative to the largest, 0 = all (default %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=_SAMPLER.seed,
        metavar="N",
        help="seed of the sampler (default %(default)s)",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="never choose an end-of-generation token"
    )
    group.add_argument(
        "--allow-non-finite",
        action="store_true",
        help="go on where the model's logits are NaN or infinite; else the run ends there",
    )


def _add_penalties(group: argparse._ArgumentGroup) -> None:
    """--logit-bias and the repetition penalties."""
    group.add_argument(
        "--logit-bias",
        type=_logit_bias,
        action="append",
        default=[],
        metavar="TOKEN_ID(+/-)BIAS",
        help="add to the logit of a token, for example 302+1 or 302-1.5; repeatable",
    )
    for option, metavar, meaning in (
        ("repeat-penalty", "R", "divides positive logits of recent tokens, 1 = off"),
        ("presence-penalty", "A", "taken off the logit of every recent token, 0 = off"),
        ("frequency-penalty", "A", "the same for each time that it occurred, 0 = off"),
    ):
        group.add_argument(
            f"--{option}",
            type=real,
            default=getattr(_SAMPLER, option.replace("-", "_")),
            metavar=metavar,
            help=f"{meaning} (default %(default)s)",
        )
    group.add_argument(
        "--repeat-last-n",
        type=int,
        default=_SAMPLER.repeat_last_n,
        metavar="N",
        help="tokens that the penalties call recent, 0 = none, -1 = all (default %(default)s)",
    )


def sampler_options(args: argparse.Namespace) -> SamplerOptions:
    """The chain as the engine takes it. Raises OptionError for a value out of range."""
    return SamplerOptions(
        temp=args.temp,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        typical_p=args.typical_p,
        repeat_penalty=args.repeat_penalty,
        repeat_last_n=args.repeat_last_n,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=tuple(args.logit_bias),
    )


def _logit_bias(text: str) -> tuple[int, float]:
    try:
        return parse_bias(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
