"""The keys of a plan, and their values checked.

A key is a long option of the command line without its dashes: every option of
`engine.options.RunOptions`, and the few here that are no options of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import OptionError
from engine.model.compute_modes import COMPUTE_MODES
from engine.option_fields import PlacedOption, build, options_in
from engine.options import RunOptions

MODEL, DRAFT_MODEL, COMPUTE, DEVICE, THREADS = (
    "model",
    "spec-draft-model",
    "compute",
    "device",
    "threads",
)
PROMPTS, PROMPT, LIMIT, CHAT, REPEAT = "prompts", "prompt", "limit", "chat", "repeat"

MOST_REPEATS = 1000
_LONGEST_TEXT, _LONGEST_NAME = 1 << 20, 4096

Check = Callable[[Any], str]
"""Says what is wrong with a value, such as "is not text"; empty when nothing is."""


def _text(longest: int) -> Check:
    def check(value: Any) -> str:
        if not isinstance(value, str):
            return "is not text"
        fits = 0 < len(value) <= longest and "\0" not in value
        return "" if fits else f"is not text of 1 to {longest:,} characters"

    return check


def _whole(low: int, high: int) -> Check:
    def check(value: Any) -> str:
        fits = type(value) is int and low <= value <= high
        return "" if fits else f"is not a whole number from {low} to {high:,}"

    return check


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "is neither true nor false"


def _compute(value: Any) -> str:
    known = isinstance(value, str) and value in COMPUTE_MODES
    return "" if known else f"is none of {', '.join(COMPUTE_MODES)}"


@dataclass(frozen=True, slots=True)
class JobKey:
    """A key that is not an option of a run. default: what a job has without it."""

    about: str
    check: Check
    default: Any = None


JOB_KEYS: dict[str, JobKey] = {
    MODEL: JobKey("GGUF file, relative to the plan, or demo", _text(_LONGEST_NAME)),
    DRAFT_MODEL: JobKey(
        "file that drafts, likewise; loaded where a drafter uses it", _text(_LONGEST_NAME)
    ),
    COMPUTE: JobKey("arithmetic of the weights", _compute, "auto"),
    DEVICE: JobKey("where models run: auto, cpu, cuda or cuda:N", _text(_LONGEST_NAME), "auto"),
    THREADS: JobKey("CPU threads; without it as many as suit the model", _whole(1, 4096)),
    PROMPTS: JobKey("set of prompts: general, python or a JSON file", _text(_LONGEST_NAME)),
    PROMPT: JobKey("one text to continue, instead of a set", _text(_LONGEST_TEXT)),
    LIMIT: JobKey("how many prompts of the set, from its first", _whole(1, 1 << 20)),
    CHAT: JobKey("wrap each text as a user's message", _flag, False),
    REPEAT: JobKey("runs of a job; the median one counts", _whole(1, MOST_REPEATS), 1),
}

OPTIONS: dict[str, PlacedOption] = {
    one.option.dest.replace("_", "-"): one for one in options_in(RunOptions)
}
KEYS = (*JOB_KEYS, *OPTIONS)

_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    int: ((int,), "is not a whole number"),
    float: ((int, float), "is not a number"),
    str: ((str,), "is not text"),
    bool: ((bool,), "is neither true nor false"),
    tuple: ((str,), "is not text"),
}


def why_wrong(key: str, value: Any) -> str:
    """What is wrong with a value of a known key; empty when nothing is."""
    if key in JOB_KEYS:
        return JOB_KEYS[key].check(value)
    one = OPTIONS[key]
    try:
        one.option.check(_read(one, value))
    except OptionError as error:
        return f"is wrong: {error.message.rstrip('.')}"
    except ValueError as error:
        return str(error)
    return ""


def run_options(settings: Mapping[str, Any]) -> RunOptions:
    """The options of a run from the settings of a job, each of which has been checked.

    Raises OptionError for options that contradict each other.
    """
    values = {
        one.path: _read(one, settings[key]) for key, one in OPTIONS.items() if key in settings
    }
    return build(RunOptions, values)


def _read(one: PlacedOption, value: Any) -> Any:
    """The value as the dataclass takes it. Raises ValueError, saying what is wrong."""
    if one.option.repeats:
        words = value if isinstance(value, list) else [value]
        return tuple(_single(one, word) for word in words)
    return _single(one, value)


def _single(one: PlacedOption, value: Any) -> Any:
    kinds, wrong = _KINDS[str if one.option.parse else one.kind]
    if type(value) not in kinds:
        raise ValueError(wrong)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("is not a finite number")
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        raise ValueError("is not a number that fits 32 bits")
    if one.option.parse:
        return one.option.parse(value)
    return float(value) if one.kind is float else value
