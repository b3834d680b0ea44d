"""A plan of a sweep, read from a TOML file and checked before anything is computed.

title = "draft lengths"
[settings]              # of every job
model = "demo"
prompts = "python"
[[grid]]                # every combination of the values in lists; the first key changes last
spec-type = "draft-mtp"
spec-draft-n-max = [1, 2, 3]
[[jobs]]                # one job
spec-type = "none"
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.draft.registry import DRAFTERS
from engine.draft.spec import DRAFT_MODEL as A_DRAFT_MODEL
from engine.draft.spec import MTP_HEAD
from engine.errors import OptionError
from engine.experiments.bench.prompts import default_set, read_prompts
from engine.files import unwritable, user_text
from engine.foreign import parse_toml
from engine.gguf.binary import shorten
from engine.model.compute_modes import COMPUTE_MODES
from engine.option_fields import PlacedOption, build, differing, options_in, plain_value
from engine.options import RunOptions

MODEL, DRAFT_MODEL = "model", "spec-draft-model"
COMPUTE, DEVICE, THREADS = "compute", "device", "threads"
SPEC_TYPE = "spec-type"
PROMPTS, PROMPT, LIMIT, CHAT, REPEAT = "prompts", "prompt", "limit", "chat", "repeat"

MOST_REPEATS = 1000
_LONGEST_TEXT, _LONGEST_NAME = 1 << 20, 4096

Check = Callable[[Any], str]
"""Returns what is wrong with a value, such as "is not text"; empty if valid."""


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


JOB_KEYS: dict[str, tuple[str, Check, Any]] = {
    MODEL: ("GGUF file, relative to the plan, or demo", _text(_LONGEST_NAME), None),
    DRAFT_MODEL: (
        "draft model file, likewise; loaded if a drafter uses it",
        _text(_LONGEST_NAME),
        None,
    ),
    COMPUTE: ("arithmetic of the weights", _compute, "auto"),
    DEVICE: ("where models run: auto, cpu, cuda or cuda:N", _text(_LONGEST_NAME), "auto"),
    THREADS: ("CPU threads; by default the best number for the model", _whole(1, 4096), None),
    PROMPTS: ("set of prompts: general, python or a JSON file", _text(_LONGEST_NAME), None),
    PROMPT: ("one text to continue, instead of a set", _text(_LONGEST_TEXT), None),
    LIMIT: ("number of prompts to use, from the first", _whole(1, 1 << 20), None),
    CHAT: ("wrap each text as a user's message", _flag, False),
    REPEAT: ("runs of a job, of which the median is used", _whole(1, MOST_REPEATS), 1),
}
"""Keys that are not run options: description, check, and default."""

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
    """What is wrong with a value of a known key; empty if valid."""
    if key in JOB_KEYS:
        return JOB_KEYS[key][1](value)
    one = OPTIONS[key]
    try:
        one.option.check(_read(one, value))
    except OptionError as error:
        return f"is wrong: {error.message.rstrip('.')}"
    except ValueError as error:
        return str(error)
    return ""


def run_options(settings: Mapping[str, Any]) -> RunOptions:
    """Run options from a job's settings, each of which has been checked.

    Raises OptionError for conflicting options.
    """
    values = {
        one.path: _read(one, settings[key]) for key, one in OPTIONS.items() if key in settings
    }
    return build(RunOptions, values)


def settings_of(options: RunOptions) -> dict[str, Any]:
    """The settings of a job with these options: the inverse of `run_options`."""
    keys = {one.path: key for key, one in OPTIONS.items()}
    return {keys[one.path]: plain_value(one, value) for one, value in differing(options)}


def typed_values(key: str, text: str) -> list[Any]:
    """The values of a known key that are written with commas between them; within a value that is
    a list, such as draft-mtp+ngram-mod, `+` takes the comma's place. Raises OptionError."""
    one = OPTIONS.get(key)
    is_list = one is not None and one.kind is tuple and not one.option.repeats
    is_text = one is not None and one.kind in (str, tuple)
    found: list[Any] = []
    for word in filter(None, map(str.strip, text.split(","))):
        value: Any = word.replace("+", ",") if is_list else word
        if not is_text:
            with suppress(ValueError):
                value = json.loads(word)
        if problem := why_wrong(key, value):
            raise OptionError(f"{key}: {shorten(word, 40)} {problem}.", "Correct the values.")
        found.append(value)
    if not found:
        raise OptionError(f"{key} has no values.", "Write them separated by commas.")
    return found


def _read(one: PlacedOption, value: Any) -> Any:
    """The value for the dataclass. Raises ValueError, saying what is wrong."""
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


DEMO = "demo"
MOST_JOBS = 100_000
_MOST_BYTES = 1 << 20
_MOST_CHARACTERS = 32 << 20
_PARTS = ("title", "settings", "grid", "jobs")
_PLAN_FILE, _TEXTS_FILE = "plan.toml", "prompts.json"
_REMEDY = "Correct the plan."


Bundled = tuple[tuple[Path, Path], Mapping[str, Path]]
"""Names that a plan may use: target and draft of "demo", and prompt files."""


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One run to be measured: a set of prompts decoded with given settings.

    number: its place in the plan, from 1. key: 16 hexadecimal digits, equal for jobs with equal
    settings and prompts. settings: as in the plan, by key. draft: the drafter's file, if any.
    prompts: texts.
    """

    number: int
    key: str
    settings: Mapping[str, Any]
    model: Path
    draft: Path | None
    options: RunOptions
    prompts: tuple[str, ...]

    def setting(self, key: str) -> Any:
        """The value of a key that is not a run option, or its default."""
        return self.settings.get(key, JOB_KEYS[key][2])

    @property
    def files(self) -> tuple[Path, ...]:
        """The model files that the job opens."""
        return (self.model,) if self.draft is None else (self.model, self.draft)


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """jobs: distinct, in the plan's order. n_equal: number of duplicates."""

    path: Path
    title: str
    text: str
    jobs: tuple[SweepJob, ...]
    n_equal: int


def read_plan(
    path: Path, bundled: Bundled, *, on_demo: bool = False, elsewhere: bool = False
) -> SweepPlan:
    """Read a plan. on_demo: jobs without a model use the demo models. elsewhere: model files need
    not be on this machine.

    Raises OptionError naming file and line or key for anything that is not a plan, an unknown key,
    a wrong value, conflicting options, and more than MOST_JOBS jobs.
    """
    text = user_text(path, _MOST_BYTES)
    try:
        table = parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, "", f"is not valid TOML ({str(error)[:120]})") from error
    for key in table:
        if key not in _PARTS:
            raise _wrong(path, key, f"is unknown; known are {', '.join(_PARTS)}")
    title = table.get("title", path.stem)
    if not isinstance(title, str) or len(title) > 200:
        raise _wrong(path, "title", "is not text of at most 200 characters")
    common = _table(path, "settings", table.get("settings", {}))
    _check(path, "settings", common, lists=False)
    maker = _JobMaker(path, bundled, on_demo, elsewhere)
    jobs: dict[str, SweepJob] = {}
    n, n_characters = 0, 0
    for place, settings in _combinations(path, table, common):
        n += 1
        n_characters += len(settings.get(PROMPT, ""))
        if n_characters > _MOST_CHARACTERS:
            raise _wrong(
                path,
                f"{place}, {PROMPT}",
                f"makes more than {_MOST_CHARACTERS >> 20} MiB in all jobs",
                "Write it into a file, and set prompts to that file.",
            )
        job = maker.job(place, settings)
        if job.key not in jobs:
            jobs[job.key] = replace(job, number=len(jobs) + 1)
    if not jobs:
        raise _wrong(path, "", "has no jobs; add [[grid]] or [[jobs]]")
    return SweepPlan(path, title, text, tuple(jobs.values()), n - len(jobs))


def write_plan(
    folder: Path,
    title: str,
    texts: Sequence[str],
    settings: Mapping[str, Any],
    grids: Sequence[Mapping[str, Any]],
) -> SweepPlan:
    """Write a plan, and these prompts next to it, into a folder that must be new, and read it.
    Models are absolute paths. Raises OptionError; the folder is removed then."""
    tables = [("[settings]", {**settings, PROMPTS: _TEXTS_FILE}), *(("[[grid]]", g) for g in grids)]
    lines = [f"title = {_toml(shorten(title, 200))}"]
    for head, table in tables:
        lines += [head, *(f"{key} = {_toml(value)}" for key, value in table.items())]
    try:
        folder.mkdir(parents=True)
        (folder / _TEXTS_FILE).write_text(json.dumps(list(texts)), encoding="utf-8")
        (folder / _PLAN_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritable(folder, error, "Name a new folder.") from error
    try:
        return read_plan(folder / _PLAN_FILE, ((folder, folder), {}))
    except OptionError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _toml(value: Any) -> str:
    """A text, number, flag or list as TOML, whose texts are those of JSON but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _combinations(
    path: Path, table: Mapping[str, Any], common: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each job's place in the plan, and its settings."""
    parts = list(_parts(path, table))
    n = 0
    for place, part in parts:
        is_grid = place.startswith("grid")
        _check(path, place, part, lists=is_grid)
        axes = [value for value in part.values() if is_grid and isinstance(value, list)]
        n += math.prod(map(len, axes))
    if n > MOST_JOBS:
        raise _wrong(path, "grid", f"makes {n:,} jobs, more than {MOST_JOBS:,}")
    for place, part in parts:
        if place.startswith("jobs"):
            yield place, {**common, **part}
            continue
        values = [value if isinstance(value, list) else [value] for value in part.values()]
        for chosen in itertools.product(*values):
            yield place, {**common, **dict(zip(part, chosen, strict=True))}


def _parts(path: Path, table: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Grids and jobs in their order in the plan, with their places."""
    for name, found in table.items():
        if name in ("grid", "jobs"):
            for i, part in enumerate(found if isinstance(found, list) else [found], 1):
                yield f"{name} {i}", _table(path, f"{name} {i}", part)


def _table(path: Path, place: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(path, place, "is not a table")
    return value


def _check(path: Path, place: str, table: Mapping[str, Any], *, lists: bool) -> None:
    """Check all keys and values. lists: whether lists of values are allowed, as axes of a grid."""
    for key, value in table.items():
        if key not in KEYS:
            near = key.lower().replace("_", "-")
            hint = f"; do you mean {near}?" if near in KEYS else ""
            raise _wrong(
                path,
                f"{place}, {key}",
                f"is unknown{hint}",
                f"Use long options of `draftscope run` without dashes, or {', '.join(JOB_KEYS)}.",
            )
        is_axis = lists and isinstance(value, list)
        if is_axis and not value:
            raise _wrong(path, f"{place}, {key}", "has no values")
        for one in value if is_axis else [value]:
            if problem := why_wrong(key, one):
                raise _wrong(path, f"{place}, {key} = {_shown(one)}", problem)


def _shown(value: Any) -> str:
    try:
        words = repr(value)
    except ValueError:  # a number of thousands of digits
        return "a number"
    return words if len(words) <= 40 else f"{words[:40]}…"


class _JobMaker:
    """Makes jobs from settings; each file is looked up once."""

    def __init__(self, path: Path, bundled: Bundled, on_demo: bool, elsewhere: bool) -> None:
        self._path, (self._models_of_demo, self._sets) = path, bundled
        self._on_demo, self._elsewhere = on_demo, elsewhere
        self._prompts: dict[tuple[str, int | None], tuple[tuple[str, ...], str]] = {}
        self._models: dict[str, Path] = {}

    def job(self, place: str, settings: dict[str, Any]) -> SweepJob:
        if self._on_demo:
            settings = {MODEL: DEMO, **settings}
        if MODEL not in settings:
            raise _wrong(self._path, f"{place}, {MODEL}", "is missing", "Name a GGUF file.")
        try:
            options = run_options(settings)
        except OptionError as error:
            raise _wrong(
                self._path, place, f"cannot be: {error.message.rstrip('.')}", error.remedy
            ) from error
        prompts, digest = self._texts(place, settings)
        return SweepJob(
            0,
            _digest([settings, digest])[:16],
            settings,
            self._model(place, settings[MODEL], MODEL),
            self._draft(place, settings, options),
            options,
            prompts,
        )

    def _draft(self, place: str, settings: dict[str, Any], options: RunOptions) -> Path | None:
        needs = {name: DRAFTERS[name].needs for name in options.spec.types}
        users = [name for name in needs if DRAFTERS[name].has_file]
        if not users and not (MTP_HEAD in needs.values() and DRAFT_MODEL in settings):
            return None
        if len(users) > 1:
            raise _wrong(
                self._path,
                f"{place}, spec-type",
                f"names {' and '.join(users)}, which need a file each",
                "Name one drafter with a file in each job.",
            )
        if (name := settings.get(DRAFT_MODEL)) is not None:
            return self._model(place, name, DRAFT_MODEL)
        if settings[MODEL] == DEMO and needs[users[0]] is A_DRAFT_MODEL:
            return self._models_of_demo[1]
        raise _wrong(
            self._path,
            f"{place}, {DRAFT_MODEL}",
            f"is missing, and {users[0]} needs it",
            "Name a GGUF file.",
        )

    def _model(self, place: str, name: str, key: str) -> Path:
        if name == DEMO:
            return self._models_of_demo[key == DRAFT_MODEL]
        if name not in self._models:
            path = _beside(self._path, name)
            if not self._elsewhere:
                self._check_is_file(place, key, path)
            self._models[name] = path
        return self._models[name]

    def _check_is_file(self, place: str, key: str, path: Path) -> None:
        try:
            is_there = path.is_file()
        except OSError:  # a name that the system rejects
            is_there = False
        if not is_there:
            what = f"names {shorten(str(path), 200)}, which is not a file"
            raise _wrong(self._path, f"{place}, {key}", what)

    def _texts(self, place: str, settings: dict[str, Any]) -> tuple[tuple[str, ...], str]:
        """The prompts of a job, and their hash."""
        name, limit = settings.get(PROMPTS), settings.get(LIMIT)
        if (text := settings.get(PROMPT)) is not None:
            if name is not None:
                at = f"{place}, {PROMPT}"
                raise _wrong(self._path, at, "cannot be combined with prompts")
            return (text,), _digest([text])
        name = name or default_set(self._sets, on_demo=settings[MODEL] == DEMO)
        if (name, limit) not in self._prompts:
            path = self._sets.get(name) or _beside(self._path, name)
            self._check_is_file(place, PROMPTS, path)
            texts = tuple(prompt.text for prompt in read_prompts(path)[:limit])
            self._prompts[name, limit] = texts, _digest(texts)
        return self._prompts[name, limit]


def _beside(plan: Path, name: str) -> Path:
    """A file named in a plan, relative to the plan's folder."""
    try:
        named = Path(name).expanduser()
    except RuntimeError:  # the home of an unknown user
        named = Path(name)
    return (plan.parent / named).absolute()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _wrong(path: Path, place: str, what: str, remedy: str = _REMEDY) -> OptionError:
    where = f"{path.name}: {shorten(place, 120)}" if place else path.name
    return OptionError(f"{where} {shorten(what, 600)}.", remedy)
