"""The options of the prompt cache; names and defaults are llama.cpp's."""

from __future__ import annotations

import argparse

from engine.errors import OptionError
from engine.options import CacheOptions

_CACHE = CacheOptions()


def add_cache(parser: argparse.ArgumentParser) -> None:
    """--cache-prompt, --ctx-checkpoints and --checkpoint-min-step."""
    group = parser.add_argument_group("prompt cache (--w1)")
    group.add_argument(
        "--cache-prompt",
        action=argparse.BooleanOptionalAction,
        help="process only what is new in a prompt (default yes)",
    )
    group.add_argument(
        "-ctxcp",
        "--ctx-checkpoints",
        type=int,
        metavar="N",
        help="recurrent states kept along the text, to go on from its middle "
        f"(default {_CACHE.ctx_checkpoints})",
    )
    group.add_argument(
        "-cms",
        "--checkpoint-min-step",
        type=int,
        metavar="N",
        help="tokens between two of them, but for those at the end of a prompt and at its last "
        f"message (default {_CACHE.checkpoint_min_step})",
    )


def cache_options(args: argparse.Namespace) -> CacheOptions | None:
    """The options as the engine takes them, None without a cache. Raises OptionError."""
    given = {name: value for name, value in _sizes(args).items() if value is not None}
    if args.cache_prompt is False:
        if given:
            raise OptionError(
                f"{_option(next(iter(given)))} goes not with --no-cache-prompt.",
                "Leave one of the two out.",
            )
        return None
    return CacheOptions(**given)


def refuse_cache(args: argparse.Namespace) -> None:
    """Raises OptionError if any of the options is given."""
    for name, value in {"cache_prompt": args.cache_prompt, **_sizes(args)}.items():
        if value is not None:
            raise OptionError(f"{_option(name)} goes with --w1 only.", "Leave it out.")


def _sizes(args: argparse.Namespace) -> dict[str, int | None]:
    return {
        "ctx_checkpoints": args.ctx_checkpoints,
        "checkpoint_min_step": args.checkpoint_min_step,
    }


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
