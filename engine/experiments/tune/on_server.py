"""Settings measured on a user's own server: started with each of them, or already running.

The longest draft is measured first, and its rounds are recorded if the server reports them. The
simulator then tells which lengths can be faster than the best so far; the middle one is next.
Without rounds, lengths are tried from the shortest on until two in a row are clearly slower than
the best. Floors are tried at the best two lengths. The best three settings, except those that are
much slower, are then measured in alternation with plain decoding. Measurements are kept in a file
if one is named, so that the same command can resume.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import ValidationError, convert

from engine.errors import OptionError, PeerLibraryError, ServerError
from engine.experiments.bench.llama_programs import free_port, served
from engine.experiments.bench.request import PLAIN
from engine.experiments.bench.server_speed import ServerPass, TimedServer
from engine.experiments.tune.advice import EngineFlags, Verdict, engine_flags, verdict
from engine.experiments.tune.confirm import SIGNIFICANT, Confirmed
from engine.experiments.tune.lengths import (
    DraftSetting,
    ServerRounds,
    TokensPerRound,
    at_best,
    has_floor,
    recorded,
)
from engine.files import unwritable
from engine.plain_text import counted

_WAIT_LONGER = "Give it more time with --budget, or check its log."
_LEAST_TOKENS = 16
_CLEARLY_SLOWER, _HOPELESS = 0.9, 0.8
_WORTH = 1.02
"""Least possible speed-up over the best length for another one to be measured."""
_N_FINALISTS = 3
_WARM_TOKENS = 8
_AGAIN = 3
"""How often a prompt is asked if its text does not matter."""
_SHARE, _PAIRS = 0.9, 0.45
"""Planned share of the seconds left: for measuring each setting once; for all pairs of all
finalists."""
_ENOUGH_TOKENS = 64
"""Tokens per answer; for fewer, a pair has fewer prompts instead."""
_SCREENING = 0.4
"""Share of the given seconds after which no further setting is tried."""
_MOST_PAIRS = 4
"""Most pairs, as a multiple of those asked for, if the comparison is undecided."""
_OVERTIME = 1.0
"""How long after the given seconds a server is still waited for, as a share of them."""
_SURE = 0.01
"""Significance level for additional pairs: stricter, because testing after each pair makes a chance
result more likely."""
_MARGIN = 1.2
"""Another pair is started if this multiple of the time of the last one is left."""
_FAMILIES = ("vllm", "sglang")
_HEAD = '{"kind": "draftscope tune --server"'
"""Start of a file of measurements."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """command: of a server, with {flags} for the flags of a setting, and {port}; both are appended
    if missing. running: instead, addresses of running servers by name. files: of drafters, if the
    command does not name them. key: API key of the servers; default: that in the command. lengths
    and floors: of drafts, for each drafter. rates: of synthetic acceptance, at least as many as the
    longest draft has tokens. most_s: total seconds. kept: file of measurements."""

    prompts: Sequence[str]
    command: str = ""
    running: Mapping[str, str] = field(default_factory=dict)
    drafters: Sequence[str] = ()
    lengths: Sequence[int] = (1, 2, 3, 4, 6, 8)
    floors: Sequence[float] = (0.5, 0.75)
    rates: Sequence[float] = ()
    n_predict: int = 128
    pairs: int = 6
    most_s: float = 300.0
    ignore_eos: bool = False
    kept: Path | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    key: str = ""


@dataclass(frozen=True, slots=True)
class ServerTuned:
    """The result. screened: speed and acceptance of every setting that was measured once. flags:
    for the engine of the command; those of the fastest so far if the verdict chooses nothing."""

    n_predict: int
    screened: Mapping[str, tuple[float, float | None]]
    confirmed: Sequence[Confirmed]
    verdict: Verdict
    flags: EngineFlags | None


def tune_server(plan: ServerPlan, report: Callable[[str], None] = lambda what: None) -> ServerTuned:
    """Find the best setting. Raises OptionError for a command that cannot be started or too few
    rates, PeerLibraryError if a server ends, ServerError if one does not answer, unless the time
    ended after a setting that drafts was measured."""
    if plan.running and PLAIN not in plan.running:
        raise OptionError(
            f"None of the servers has the name {PLAIN}.",
            f"Give the server without speculation as {PLAIN}=URL.",
        )
    longest = max(plan.lengths, default=0)
    if plan.rates and len(plan.rates) < longest:
        raise OptionError(
            f"--spec-synth-rates has {len(plan.rates)} values for drafts of {longest} tokens.",
            "Give one for each token, or shorter --lengths.",
        )
    return _Tuner(plan, report).tune()


class _Tuner:
    def __init__(self, plan: ServerPlan, report: Callable[[str], None]) -> None:
        self.plan, self.report = plan, report
        # synthetic acceptance ignores the text: a short prompt leaves more time for tokens
        self.prompts = [min(plan.prompts, key=len)] * _AGAIN if plan.rates else plan.prompts
        began = time.monotonic()
        self.until, self.screen_until = began + plan.most_s, began + _SCREENING * plan.most_s
        self.given_up = self.until + _OVERTIME * plan.most_s
        self.kept = _SavedMeasurements(plan)
        self.start_s = self.prompt_s = 0.0
        self.settings: dict[str, DraftSetting] = {}
        self.models: dict[int, str] = {}  # name by number of parameters, 0 if unknown
        self.n_predict = self.kept.n_predict or plan.n_predict
        self.screened: dict[str, tuple[float, float | None]] = {}
        self.is_over = False

    def tune(self) -> ServerTuned:
        with self._in_time():
            for name in [*self.plan.running] or [PLAIN]:
                self._screen(name)
            if not self.plan.running:
                for drafter in self.plan.drafters:
                    self._screen_lengths(drafter)
        ranked = sorted(self.screened, key=lambda name: -self.screened[name][0])
        least = _HOPELESS * self.screened[ranked[0]][0]
        drafting = [name for name in ranked if name != PLAIN]
        near = [name for name in drafting[1:_N_FINALISTS] if self.screened[name][0] >= least]
        confirmed = [] if self.is_over else self._confirm([PLAIN, *drafting[:1], *near])
        once = {name: self.screened[name][0] for name in ranked}
        judged = verdict(confirmed, self.plan.pairs, once)
        flags = None
        if not self.plan.running:
            flags = self._engine_flags(self.settings.get(judged.chosen or judged.fastest))
        return ServerTuned(self.n_predict, self.screened, confirmed, judged, flags)

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """A part of the work that ends where an answer is given up because the time is over, if
        what has been measured allows a comparison."""
        try:
            yield
        except (PeerLibraryError, ServerError):
            if time.monotonic() < self.given_up or self.screened.keys() <= {PLAIN}:
                raise
            self.is_over = True

    def _screen_lengths(self, drafter: str) -> None:
        """Lengths that the recorded longest one makes promising, or from the shortest on; then
        floors at the best two."""
        lengths = sorted(self.plan.lengths)
        longest = self._name(DraftSetting(drafter, lengths[-1]))
        found = {lengths[-1]: self._screen(longest, by_round=True)}
        answers = self.kept.rounds.get(longest, ())
        rounds = recorded(
            [[one for one in of if 0 <= one[1] <= one[0] <= lengths[-1]] for of in answers],
            self.plan.rates,
        )
        worse = 0
        while left := [n_max for n_max in lengths if n_max not in found]:
            n_max = left[0] if rounds is None else self._promising(rounds, found, lengths)
            if n_max is None or worse == 2 or time.monotonic() > self.screen_until:
                break
            speed = self._screen(self._name(DraftSetting(drafter, n_max)))
            is_slower = speed < _CLEARLY_SLOWER * max(found.values())
            worse = worse + 1 if is_slower and rounds is None else 0
            found[n_max] = speed
        if has_floor(drafter) and not self.plan.rates:
            for n_max in sorted(found, key=lambda n: -found[n])[:2]:
                for floor in self.plan.floors:
                    if time.monotonic() < self.screen_until:
                        self._screen(self._name(DraftSetting(drafter, n_max, floor)))

    def _promising(
        self, per_round: TokensPerRound, found: Mapping[int, float], lengths: Sequence[int]
    ) -> int | None:
        """The next length to measure: the middle one of those that may be worth it; None if no
        other can be clearly faster than the best."""
        speeds = at_best(per_round, {0: self.screened[PLAIN][0], **found}, lengths)
        best = max(found.values())
        worth = [n for n in lengths if n not in found and speeds[n] > _WORTH * best]
        return worth[len(worth) // 2] if worth else None

    def _name(self, setting: DraftSetting) -> str:
        self.settings[setting.name] = setting
        return setting.name

    def _screen(self, name: str, *, by_round: bool = False) -> float:
        """Speed of a setting, measured once. The first one also decides how many tokens the time
        allows. by_round: keep its rounds."""
        known = self.kept.screened.get(name)
        if known is None:
            began = time.monotonic()
            with self._server(name) as server:
                start_s = time.monotonic() - began
                if not self.screened:
                    self._choose_n_predict(server, start_s)
                plan = self.plan
                done = self._ask(server, self.prompts, self.n_predict, by_round=by_round)
            self.start_s, self.prompt_s = max(self.start_s, start_s), done.prompt_s
            known = done.speed(plan.rates), done.acceptance
            if by_round:
                self.kept.add({"name": name, "rounds": [one.rounds for one in done.answers]})
            self.kept.add({"screened": name, "speed": known[0], "acceptance": known[1]})
        self.screened[name] = known
        self.report(f"{name}: {known[0]:.1f} tok/s")
        return known[0]

    def _choose_n_predict(self, server: TimedServer, start_s: float) -> None:
        """Set the tokens per request that fit into the time at the speed of plain decoding."""
        plan = self.plan
        tried = server.ask(self.prompts[:1], _LEAST_TOKENS, ignore_eos=True)
        n_settings = len(plan.running) or 1 + len(plan.drafters) * (
            len(plan.lengths) + 2 * len(plan.floors) * (not plan.rates)
        )
        left = _SHARE * max(0.0, self.screen_until - time.monotonic()) / n_settings
        each = (left - start_s) / len(self.prompts) - tried.prompt_s
        fits = int(max(0.0, each) * (tried.speed() or 1.0))
        self.n_predict = max(_LEAST_TOKENS, min(plan.n_predict, fits))
        self.kept.add({"n_predict": self.n_predict})
        self.report(f"{counted(len(self.prompts), 'prompt')}, {self.n_predict} tokens each")

    def _in_pairs(self, names: Sequence[str]) -> tuple[int, int]:
        """Prompts of a pair and tokens of an answer, as many as the time left allows at the
        measured speeds, which other work on the machine may have changed."""
        if self.kept.in_pairs is None:
            left = _PAIRS * (self.until - time.monotonic()) - self.start_s * len(names)
            each = sum(1 / max(self.screened[name][0], 1e-3) for name in names)
            for n_prompts in range(len(self.prompts), 0, -1):
                of_prompt = left / (self.plan.pairs * n_prompts) - self.prompt_s * len(names)
                if (fits := int(of_prompt / each)) >= min(_ENOUGH_TOKENS, self.n_predict):
                    break
            n_predict = max(_LEAST_TOKENS, min(self.n_predict, fits))
            self.kept.add({"in_pairs": (n_prompts, n_predict)})
        assert self.kept.in_pairs is not None
        n_prompts, n_predict = self.kept.in_pairs
        self.report(f"pairs of {counted(n_prompts, 'prompt')}, {n_predict} tokens each")
        return self.kept.in_pairs

    def _confirm(self, names: Sequence[str]) -> list[Confirmed]:
        """Measure the finalists in alternation, with all servers running at once if memory allows.
        If the pairs do not show whether the fastest beats plain decoding, these two continue.
        Returns whole pairs; none if the time ended in the first."""
        texts: dict[str, dict[int, tuple[str, ...]]] = {name: {} for name in names}
        speeds: dict[str, list[float]] = {name: [] for name in names}
        n_prompts, n_predict = self._in_pairs(names)
        around = [*self.prompts, *self.prompts]
        number = 0
        with self._in_time(), ExitStack() as stack:
            servers: dict[str, TimedServer] = {}
            together, racing, took_s = True, list(names), 0.0
            for number in range(_MOST_PAIRS * self.plan.pairs):
                began = time.monotonic()
                if number >= self.plan.pairs:
                    racing = self._undecided(racing, speeds)
                    is_kept = all((name, number) in self.kept.pairs for name in racing)
                    if not racing or not (is_kept or began + _MARGIN * took_s < self.until):
                        break
                first, start = number % len(racing), number * n_prompts % len(self.prompts)
                prompts = around[start : start + n_prompts]
                for name in [*racing[first:], *racing[:first]]:
                    known = self.kept.pairs.get((name, number))
                    if known is not None:
                        speeds[name].append(known)
                        continue
                    if together and name not in servers:
                        try:
                            servers[name] = stack.enter_context(self._server(name))
                        except PeerLibraryError:
                            if not servers:
                                raise
                            stack.close()  # most likely not enough memory for all of them
                            servers, together = {}, False
                    with ExitStack() as alone:
                        server = servers.get(name) or alone.enter_context(self._server(name))
                        done = self._ask(server, prompts, n_predict)
                    texts[name][number] = done.texts
                    speed = done.speed(self.plan.rates)
                    speeds[name].append(speed)
                    self.kept.add({"pair": number, "name": name, "speed": speed})
                took_s = time.monotonic() - began
                planned = max(number + 1, self.plan.pairs)
                self.report(f"real runs: {number + 1} of {planned} pairs")
        plain = texts.get(PLAIN, {})
        found = []
        for name in names:
            both = [(texts[name][i], plain[i]) for i in texts[name] if i in plain]
            pairs = [pair for of in both for pair in zip(*of, strict=True)]
            same = sum(mine == other for mine, other in pairs)
            n_whole = number if self.is_over else len(speeds[name])
            found.append(Confirmed(name, tuple(speeds[name][:n_whole]), same, len(pairs), ()))
        return [one for one in found if one.speeds]

    def _undecided(self, racing: Sequence[str], speeds: Mapping[str, Sequence[float]]) -> list[str]:
        """Plain decoding and the fastest other one, if their pairs do not show which is faster."""
        judged = verdict([Confirmed(name, tuple(speeds[name]), 0, 0, ()) for name in racing])
        against, is_last = judged.against_plain, len(speeds[PLAIN]) == self.plan.pairs
        if against is None or against.p < (SIGNIFICANT if is_last else _SURE):
            return []
        return [PLAIN, judged.fastest]

    @contextmanager
    def _server(self, name: str) -> Iterator[TimedServer]:
        """A server with this setting that answers; it is stopped afterwards if it was started
        here."""
        left = min(self.plan.most_s, self.given_up - time.monotonic())
        if self.plan.running:
            server = TimedServer(self.plan.running[name], self.plan.key)
            server.wait(lambda: None, left, _WAIT_LONGER)
            self.models.setdefault(server.n_params, name)
            if len(models := [one for one in self.models.items() if one[0]]) > 1:
                (n, one), (other_n, other) = models
                raise OptionError(
                    f"{one} and {other} have other models: {n:,} and {other_n:,} parameters.",
                    "Name servers with the same model.",
                )
            self._warm(server)
            yield server
            return
        port = free_port()
        program, words = self._command(name, port)
        after = dict(pairwise(words))
        key = self.plan.key or after.get("--api-key", "").partition(",")[0]
        with served(program, words, port, left, _WAIT_LONGER, key) as server:
            self._warm(server)
            yield server

    def _ask(
        self, server: TimedServer, prompts: Sequence[str], n: int, *, by_round: bool = False
    ) -> ServerPass:
        """by_round: also get rounds. Synthetic acceptance always needs them, to exclude luck."""
        by_round = by_round or bool(self.plan.rates)
        return server.ask(prompts, n, ignore_eos=self.plan.ignore_eos, by_round=by_round)

    def _warm(self, server: TimedServer) -> None:
        """Ask once, because what a server does for the first time takes longer."""
        server.until = self.given_up
        server.ask(self.prompts[:1], _WARM_TOKENS, ignore_eos=True)

    def _command(self, name: str, port: int) -> tuple[Path, list[str]]:
        try:
            words = shlex.split(self.plan.command)
        except ValueError as error:
            raise OptionError(
                f"--server cannot be read: {error}.", "Close its quotation marks."
            ) from error
        if words and _ASSIGNMENT.match(words[0]):
            words.insert(0, "env")
        found = shutil.which(words[0]) if words else None
        if found is None:
            raise OptionError(
                f"The program {(words or [''])[0][:80]!r} of --server does not exist.",
                "Start the command with a program in $PATH, or with its path.",
            )
        flags = self._words(name)
        longest = self._engine_flags(DraftSetting("draft-mtp", 1, 0.5))[1]
        changed = [*flags, *longest.split(), "--spec-synth-rates", "--spec-synth-len"]
        mine = {word for word in self.plan.command.split() if word.startswith("-")}
        if given := [word for word in changed if word in mine]:
            raise OptionError(
                f"The command of --server has {given[0]}, which the settings change.",
                "Leave it out there; give synthetic acceptance rates with --spec-synth-rates of "
                "this command.",
            )
        if not any("{flags}" in word for word in words):
            words.append("{flags}")
        if not any("{port}" in word for word in words):
            words += ["--port", "{port}"]
        expanded: list[str] = []
        for word in words[1:]:
            inside = word.replace("{port}", str(port)).replace("{flags}", shlex.join(flags))
            expanded += flags if word == "{flags}" else [inside]
        return Path(found), expanded

    def _words(self, name: str) -> list[str]:
        if name == PLAIN:
            return ["--spec-type", "none"] if self._family == "llama-server" else []
        setting = self.settings[name]
        words = shlex.split(self._engine_flags(setting)[1])
        if self.plan.rates:
            rates = self.plan.rates[: setting.n_max]
            words += ["--spec-synth-rates", ",".join(f"{rate:g}" for rate in rates)]
        return words

    @property
    def _family(self) -> str:
        words = self.plan.command.split()
        named = [name for name in _FAMILIES if any(name in word for word in words)]
        is_llama = any(Path(word).name.startswith("llama-server") for word in words)
        return "llama-server" if is_llama or not named else named[0]

    def _engine_flags(self, setting: DraftSetting | None) -> EngineFlags:
        known = {one[0].lower(): one for one in engine_flags(setting, self.plan.files)}
        return known[self._family]


class _SavedMeasurements:
    """Measurements in a file, one JSON object per line; the first line identifies the command."""

    def __init__(self, plan: ServerPlan) -> None:
        self.n_predict: int | None = None
        self.in_pairs: tuple[int, int] | None = None
        self.screened: dict[str, tuple[float, float | None]] = {}
        self.pairs: dict[tuple[str, int], float] = {}
        self.rounds: dict[str, ServerRounds] = {}
        self._path = plan.kept
        if plan.kept is None:
            return
        of = json.dumps([plan.command, dict(plan.running), list(plan.prompts), plan.n_predict])
        key = hashlib.sha256(f"{of} {plan.rates} {plan.ignore_eos}".encode()).hexdigest()[:16]
        lines = plan.kept.read_text(encoding="utf-8").splitlines() if plan.kept.exists() else []
        if all(line.startswith(_HEAD) for line in lines):  # only commands that failed to start
            self.add({"kind": "draftscope tune --server", "of": key})
            return
        try:
            read = [json.loads(line) for line in lines if line.endswith("}")]
            if [one["of"] for one in read if "of" in one][-1] != key:
                raise KeyError
            for one in read:
                self._take(one)
        except (ValueError, LookupError, TypeError, ValidationError) as error:
            raise OptionError(
                f"{plan.kept} has measurements of another command, or is something else.",
                "Name another file with --keep, or delete it.",
            ) from error

    def _take(self, one: Mapping[str, Any]) -> None:
        if "of" in one:
            return
        if "n_predict" in one:
            self.n_predict = convert(one["n_predict"], int)
        elif "in_pairs" in one:
            self.in_pairs = convert(one["in_pairs"], tuple[int, int])
        elif "rounds" in one:
            self.rounds[one["name"]] = convert(one["rounds"], list[list[tuple[int, int]]])
        elif "screened" in one:
            known = convert((one["speed"], one["acceptance"]), tuple[float, float | None])
            self.screened[one["screened"]] = known
        else:
            self.pairs[one["name"], convert(one["pair"], int)] = convert(one["speed"], float)

    def add(self, line: Mapping[str, object]) -> None:
        """Apply a line, append it and sync it to disk. Raises OptionError if that fails."""
        self._take(line)
        if self._path is None:
            return
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(self._path, error, "Name another file with --keep.") from error
