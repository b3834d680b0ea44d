"""A model's file is rewritten, shortened, replaced or removed while it is used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from engine.gguf.part_file import CHANGES, LOOK_S
from engine.memory.hybrid import HybridMemory
from engine.model.hybrid import HybridModel
from engine.trace.reopen import open_trace
from tests.support.golden_files import DATA
from tests.support.scripted_server import ScriptedServer
from tests.torture.campaign import Campaign, Case, Figures
from tests.torture.campaigns.cli import _options
from tests.torture.commands import Said, said_by

_MODELS = (
    "qwen35-c-v2x-mtp-f32",
    "qwen35-g-v2x-q4_k_m",
    "qwen35-h-v2x-mtp-q8_0",
    "lfm2-a-tied-f32",
)
_IN_BLOCKS = _MODELS[1:3]
_COMPUTE = ("f32", "auto", "blocks", "q8")
"""Of the models in blocks, weights stay in a mapped file in all but the first."""
_TOKENS = "5,9,5,9,5,9,31"
_N = 20
_CHANGES = ("other", "cut", "noise", "empty", "zeros", "replace", "remove", "touch", "longer")
_WRITTEN = ("other", "noise", "zeros", "cut", "empty", "longer")
_MAPPED_CHANGES = ("empty", "other", "cut", "zeros", "empty", "replace", "cut", "noise", "remove")
_DRAFTED = ("draft-mtp", "ngram-simple", "suffix", "")


def _draw(random: np.random.Generator, number: int) -> Case:
    """Every other case maps the file, and gets it cut short in the midst of a pass by turns."""
    doing = list(_DOINGS)[number % len(_DOINGS)]
    mapped = number % 2 == 1 and _can_map()
    in_turn = _MAPPED_CHANGES if mapped else _CHANGES
    hows = [in_turn[number // 2 % len(in_turn)], *random.choice(_CHANGES, 1)]
    n = 0 if number % (4 * len(_DOINGS)) < 2 else int(random.choice([1, 1, 2]))
    stays = bool(random.random() < 0.8)
    return {
        "doing": doing,
        "model": str(random.choice(_IN_BLOCKS if stays else _MODELS)),
        "compute": str(random.choice(_COMPUTE[1:] if stays else _COMPUTE)),
        "drafter": str(random.choice(_DRAFTED)),
        "mapped": mapped,
        "changes": [
            {
                "at": int(random.integers(1, int(random.choice([4, 12, 40] if i else [4, 8])))),
                "how": str(how),
                "where": float(random.random()) ** 3,
                "within": bool(random.random() < (0.9 if mapped else 0.3)),
            }
            for i, how in enumerate(hows[:n])
        ],
    }


@cache
def _can_map() -> bool:
    return any("--mmap" in action.option_strings for action in _options("run"))


class _Changing:
    """While it is entered, a file changes before chosen forward passes of any model or within them.
    n_changed: how often. first: the pass of the first change."""

    def __init__(self, path: Path, changes: list[dict[str, Any]]) -> None:
        self._path, self._changes = path, changes
        self.n_passes = self.n_changed = self.first = 0
        self._patches = ExitStack()

    def __enter__(self) -> _Changing:
        forward, begin = HybridModel.forward, HybridMemory.begin

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.n_passes += 1
            self._change(within=False)
            return forward(*args, **kwargs)

        def begun(*args: Any) -> Any:
            there = begin(*args)
            self._change(within=True)
            return there

        self._patches.enter_context(patch.object(HybridModel, "forward", counted))
        self._patches.enter_context(patch.object(HybridMemory, "begin", begun))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    @property
    def is_written(self) -> bool:
        """Whether all that has been done to the file was writing to it."""
        return self.n_changed > 0 and all(one["how"] in _WRITTEN for one in self._changes)

    def _change(self, *, within: bool) -> None:
        for change in self._changes:
            if (change["at"], change.get("within", False)) == (self.n_passes, within):
                _change(self._path, change)
                self.n_changed += 1
                self.first = self.first or self.n_passes


def _change(path: Path, change: dict[str, Any]) -> None:
    how = change["how"]
    if how == "remove":
        path.unlink(missing_ok=True)
        return
    if not path.exists():
        return
    n = path.stat().st_size
    start = int(change["where"] * n)
    if how == "replace":
        part = path.with_name("part")
        shutil.copyfile(_file(_MODELS[0] if path.name[:8] != _MODELS[0][:8] else _MODELS[3]), part)
        os.replace(part, path)
    elif how == "touch":
        os.utime(path, (1, 1))
    elif how == "empty":
        os.truncate(path, 0)
    elif how == "cut":
        os.truncate(path, start)
    elif how == "longer":
        with path.open("ab") as file:
            file.write(bytes(4096))
    else:
        with path.open("r+b") as file:
            file.seek(start)
            file.write(_content(how, n - start))


def _content(how: str, n: int) -> bytes:
    if how == "zeros":
        return bytes(n)
    if how == "noise":
        return np.random.default_rng(n).bytes(n)
    other = _file(_MODELS[3]).read_bytes()
    return (other * (n // len(other) + 1))[:n]


def _file(name: str) -> Path:
    return DATA / f"{name}.gguf"


def _play(case: Case, folder: Path) -> Figures:
    path = folder / f"{case['model']}.gguf"
    shutil.copyfile(_file(case["model"]), path)
    compute, doing = case["compute"], case["doing"]
    if compute == "blocks" and case["model"].endswith("f32"):
        compute = "f32"
    mapped = case["mapped"] and doing in _MAPPED_TOO
    words = [str(path), "--compute", compute] + ["--mmap"] * mapped
    drafter = case["drafter"]
    if drafter == "draft-mtp" and "mtp" not in case["model"]:
        drafter = "ngram-simple"
    spec = ["--spec-type", drafter] if drafter else []
    changing = _Changing(path, case["changes"])
    said, texts = _DOINGS[doing](words, spec, folder, changing)
    said.check()
    figures = {doing: 1, "changed": changing.n_changed, f"status_{said.status}": 1}
    figures["untouched"] = not changing.n_changed
    expected = [_plain(case["model"], compute)] * len(texts) if doing in _TEXTS else texts
    is_equal = texts == expected
    if not changing.n_changed or not mapped:
        assert said.status in _GOOD.get(doing, (0,)), f"status {said.status}: {said.text[-600:]}"
        assert is_equal, f"text differs from plain decoding of the file as it was: {texts}"
        return figures | {"equal": 1, "mapped": mapped}
    told = said.text + said.out.decode("utf-8", "replace")
    assert (said.status == 0 and is_equal) or path.name in told, (
        f"status {said.status}, text {'equal' if is_equal else 'changed'}, the file is not named"
    )
    return figures | {"equal": is_equal, "mapped": 1}


def _run(
    words: list[str], spec: list[str], folder: Path, changing: _Changing
) -> tuple[Said, list[Any]]:
    with changing:
        said = said_by(["run", *words, *_ASKED, *spec, "--json"])
    return said, _texts(said)


def _texts(said: Said) -> list[Any]:
    return [one["tokens"] for one in json.loads(said.out)["sequences"]] if said.out else []


def _traced(
    words: list[str], spec: list[str], folder: Path, changing: _Changing
) -> tuple[Said, list[Any]]:
    with changing:
        said = said_by(["run", *words, *_ASKED, *spec, "--json", "--trace", str(folder / "t")])
    assert said.status or (folder / "t").is_dir()
    if not said.status and changing.is_written and "draft-mtp" not in spec:
        _noted(folder / "t", changing.first)
    return said, _texts(said)


def _noted(folder: Path, number: int) -> None:
    """Raises AssertionError unless the trace says of a change in this pass when it was found: in a
    round that ends LOOK_S later at most and the one after it, or after the last."""
    trace = open_trace(folder)
    found = trace.runs[0].get(CHANGES)
    assert found, "the trace says nothing of a change"
    rounds = trace.ubatches.column("round")
    of_pass, last, round_ = int(rounds[number - 1]), int(rounds.max()), found[0]["round"]
    numbers, t_ms = trace.rounds.column("round"), trace.rounds.column("t_ms")
    # the last round that did not find it
    missed = last if round_ is None else round_ - 1
    looked = t_ms[(numbers > of_pass) & (numbers <= missed)] - t_ms[numbers <= of_pass].max(
        initial=0
    )
    is_late = bool((looked > LOOK_S * 1e3).any())
    assert not is_late, f"a change in round {of_pass} is found in round {round_} of {last}"


def _compare(
    words: list[str], spec: list[str], _: Path, changing: _Changing
) -> tuple[Said, list[Any]]:
    """Every lane gets the same weights: none may diverge."""
    with changing:
        said = said_by(["compare", *words, *_ASKED, *(spec or ["--spec-type", "suffix"])])
    return said, []


def _conversation(
    words: list[str], spec: list[str], folder: Path, changing: _Changing
) -> tuple[Said, list[Any]]:
    turns = folder / "turns.json"
    turns.write_text(json.dumps(["the state", "is the rest", "of it"]))
    with changing:
        said = said_by(["run", *words, *spec, "-n", "8", "--turns", str(turns), "--json"])
    return said, []


def _bench(
    words: list[str], spec: list[str], folder: Path, changing: _Changing
) -> tuple[Said, list[Any]]:
    prompts = folder / "p.json"
    prompts.write_text(json.dumps([{"text": "the state", "name": "one"}]))
    with changing:
        said = said_by(["bench", *words, "-n", "8", "--prompts", str(prompts), *spec])
    return said, []


def _rescored(
    words: list[str], _spec: list[str], folder: Path, changing: _Changing
) -> tuple[Said, list[Any]]:
    """A trace of the same model, judged by a file that changes meanwhile."""
    trace = folder / "t"
    made = said_by(["run", *words, *_ASKED, "--trace", str(trace)])
    made.check(0)
    with changing:
        said = said_by(["rescore", str(trace), words[0], "--json"])
    return said, []


def _observed(
    words: list[str], _spec: list[str], _: Path, changing: _Changing
) -> tuple[Said, list[Any]]:
    """The model that re-scores is not the server's: whatever it judges, it ends with a word."""
    with ScriptedServer("mtp") as server:
        asked = ["-p", server.capture["requests"][0]["body"]["prompt"], "-n", "8", "--json"]
        with changing:
            said = said_by(["observe", server.url, *asked, "--rescore", words[0], "--assume-same"])
    return said, []


_ASKED = ["-n", str(_N), "--tokens", _TOKENS, "--temp", "0", "--ignore-eos"]
_TEXTS = ("run", "trace")
_GOOD = {"observe": (0, 1), "rescore": (0, 1)}
"""Statuses of an end without trouble, where they are others than 0: these read the file again, and
say that it is another."""
_MAPPED_TOO = ("run", "compare", "trace", "conversation", "bench")
"""What takes --mmap."""
_DOINGS: dict[str, Callable[[list[str], list[str], Path, _Changing], tuple[Said, list[Any]]]] = {
    "run": _run,
    "compare": _compare,
    "trace": _traced,
    "conversation": _conversation,
    "bench": _bench,
    "rescore": _rescored,
    "observe": _observed,
}


@cache
def _plain(model: str, compute: str) -> Any:
    """Tokens of plain decoding of a file that nothing happens to."""
    said = said_by(["run", str(_file(model)), "--compute", compute, *_ASKED, "--json"])
    said.check(0)
    return _texts(said)[0]


def _prepare() -> None:
    for model in _MODELS:
        for compute in _COMPUTE:
            if compute != "blocks" or not model.endswith("f32"):
                _plain(model, compute)


CAMPAIGN = Campaign(
    "filechange",
    "The text of the file as it was; where it is mapped, that or a word that names the file.",
    _draw,
    _play,
    _prepare,
    seconds=60.0,
    n_bytes=2**30,
    batch=8,
    n_least=14,
)
