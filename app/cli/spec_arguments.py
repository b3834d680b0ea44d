"""The options of speculation; names and defaults are llama.cpp's."""

from __future__ import annotations

import argparse

from app.cli.common import real
from engine.options import ACCEPT_RULES, DRAFTERS, SpecOptions
from engine.options.ngram_options import NgramModOptions, NgramSizes

_SPEC = SpecOptions()
_SIZES = {
    "ngram-simple": _SPEC.ngram_simple,
    "ngram-map-k": _SPEC.ngram_map_k,
    "ngram-map-k4v": _SPEC.ngram_map_k4v,
}
_HITS = {
    "ngram-simple": "has no effect, as in llama.cpp",
    "ngram-map-k": "has no effect, as in llama.cpp",
    "ngram-map-k4v": "look-ups of a key before it drafts",
}


def add_speculation(
    parser: argparse.ArgumentParser, *, default: str = "none", repeatable: bool = False
) -> None:
    """--spec-type and the parameters of every drafter.

    default: what the help says of it. repeatable: the option makes a list of drafter lists.
    """
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--spec-type",
        type=_drafters,
        action="append" if repeatable else "store",
        metavar="A[,B]",
        help=f"drafters: none, {', '.join(DRAFTERS)}; several are asked in this order, whatever "
        f"order they are given in, until one has a draft (default {default})"
        + ("; repeatable, one configuration each" if repeatable else ""),
    )
    group.add_argument("--spec-default", action="store_true", help="add ngram-mod to the drafters")
    _number(group, "--spec-draft-n-max", _SPEC.n_max, "longest draft of draft-*, tokens")
    _number(group, "--spec-draft-n-min", _SPEC.n_min, "a shorter draft is thrown away")
    group.add_argument(
        "--spec-draft-p-min",
        type=real,
        default=_SPEC.p_min,
        metavar="P",
        help="a draft ends before a token whose own probability is lower (default %(default)s)",
    )
    group.add_argument(
        "--spec-accept",
        default=_SPEC.accept,
        metavar="RULE",
        help=f"how drafted tokens are accepted: {' or '.join(ACCEPT_RULES)}. match keeps the "
        "tokens of plain decoding, rejection only their distribution: the drafter draws its "
        "tokens too, and p/q decides (default %(default)s)",
    )
    _add_ngram(parser.add_argument_group("speculation without a draft model"))


def add_synthetic(parser: argparse.ArgumentParser) -> None:
    """--spec-synth-*."""
    group = parser.add_argument_group("synthetic acceptance (benchmarks; the output is invalid)")
    group.add_argument(
        "--spec-synth-rates",
        type=_rates,
        default=(),
        metavar="P0,P1,…",
        help="probability that the first 1, 2, … drafted tokens are accepted, one value per token "
        "of the longest draft",
    )
    group.add_argument(
        "--spec-synth-len",
        type=real,
        metavar="L",
        help="instead: mean number of tokens that a full draft brings, the target's own included",
    )


def spec_options(args: argparse.Namespace) -> SpecOptions:
    """The options as the engine takes them. Raises OptionError for a value out of range."""
    types: tuple[str, ...] = args.spec_type or ()
    if args.spec_default and args.spec_type != ():  # `none` wins over it
        types = tuple(dict.fromkeys((*types, "ngram-mod")))
    mod = {name: getattr(args, f"spec_ngram_mod_{name}") for name in ("n_match", "n_min", "n_max")}
    return SpecOptions(
        types=types,
        n_max=args.spec_draft_n_max,
        n_min=args.spec_draft_n_min,
        p_min=args.spec_draft_p_min,
        accept=args.spec_accept,
        ngram_simple=_sizes(args, "ngram-simple"),
        ngram_map_k=_sizes(args, "ngram-map-k"),
        ngram_map_k4v=_sizes(args, "ngram-map-k4v"),
        ngram_mod=NgramModOptions(**mod),
        lookup_cache_static=args.lookup_cache_static,
        lookup_cache_dynamic=args.lookup_cache_dynamic,
        synth_rates=args.spec_synth_rates,
        synth_len=args.spec_synth_len,
    )


def _add_ngram(group: argparse._ArgumentGroup) -> None:
    for name, sizes in _SIZES.items():
        _number(group, f"--spec-{name}-size-n", sizes.size_n, "tokens looked up")
        _number(group, f"--spec-{name}-size-m", sizes.size_m, "longest draft")
        _number(group, f"--spec-{name}-min-hits", sizes.min_hits, _HITS[name])
    mod = _SPEC.ngram_mod
    _number(group, "--spec-ngram-mod-n-match", mod.n_match, "tokens looked up")
    _number(group, "--spec-ngram-mod-n-min", mod.n_min, "a shorter find is thrown away")
    _number(group, "--spec-ngram-mod-n-max", mod.n_max, "longest draft")
    for short, name, about in (
        ("-lcs", "static", "2-grams of a large corpus"),
        ("-lcd", "dynamic", "n-grams of earlier output"),
    ):
        group.add_argument(
            short,
            f"--lookup-cache-{name}",
            metavar="FILE",
            help=f"ngram-cache: {about}, as llama-lookup-* writes them; never changed",
        )


def _number(group: argparse._ArgumentGroup, name: str, default: int, about: str) -> None:
    group.add_argument(
        name, type=int, default=default, metavar="N", help=f"{about} (default %(default)s)"
    )


def _sizes(args: argparse.Namespace, drafter: str) -> NgramSizes:
    stem = f"spec_{drafter.replace('-', '_')}"
    return NgramSizes(
        getattr(args, f"{stem}_size_n"),
        getattr(args, f"{stem}_size_m"),
        getattr(args, f"{stem}_min_hits"),
    )


def _drafters(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    return () if "none" in names else tuple(dict.fromkeys(names))


def _rates(text: str) -> tuple[float, ...]:
    return tuple(real(word.strip()) for word in text.split(","))
