"""The prompt suite (every prompt alone, in every configuration, next to plain decoding) and its
results: written request by request, read and resumed; two of them compared.

The configurations take turns within a prompt, and the first one changes from prompt to prompt, so
that other load affects them alike.

The results file (engine.experiments.results) has a row for each request, with the whole request as
its detail, and what all requests share as its plan. `bench suite --json` prints the same as one
object (engine.experiments.bench.suite_report), which can be read too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_type_hints

from engine.errors import OptionError
from engine.experiments.bench.request import (
    PLAIN,
    Configuration,
    RequestResult,
    measure_request,
    shorter,
)
from engine.experiments.bench.suite_report import suite_report
from engine.experiments.results.reader import (
    find_results,
    is_database,
    key_of,
    kind_of_json,
    read_results,
    suite_row,
    title,
)
from engine.experiments.results.table import (
    SUITE,
    ExperimentResults,
    json_object,
    results_file,
    wrong,
)
from engine.experiments.results.writer import JobResult, ResultsWriter
from engine.files import user_text
from engine.foreign import JsonError, parse_json
from engine.options import Prompt
from engine.trace.typed_json import strict_json, strictly

if TYPE_CHECKING:
    from engine.session import Session


SUITE_KIND = "draftscope bench suite"
SUITE_VERSION = 1
_MOST_BYTES = 64 << 20


class _Aggregate(TypedDict):
    n_requests: float
    total_predicted: float
    total_draft: float
    total_draft_accepted: float
    aggregate_accept_rate: float | None
    wall_s_total: float


class _ResultRow(TypedDict):
    name: str
    predicted_per_second: float
    accept_rate: float | None


class _Compared(TypedDict):
    name: str
    aggregate: _Aggregate
    rows: list[_ResultRow]


class _SuiteJson(TypedDict):
    """The parts of a suite's JSON that a comparison needs."""

    kind: Literal["draftscope bench suite"]
    version: Literal[1]
    configurations: list[_Compared]


AGGREGATE_FIELDS = tuple(get_type_hints(_Aggregate))

Measured = dict[tuple[str, str, int], RequestResult]
"""Requests by configuration, prompt and number of the repetition, from 0."""


def medians(
    configurations: Iterable[str], prompts: Iterable[str], measured: Measured
) -> dict[str, list[RequestResult]]:
    """Per configuration the requests with the median time, in the order of the prompts."""
    taken: dict[tuple[str, str], list[RequestResult]] = {}
    for (configuration, prompt, _), request in measured.items():
        taken.setdefault((configuration, prompt), []).append(request)
    return {
        name: [
            sorted(found, key=lambda request: request.predicted_ms)[(len(found) - 1) // 2]
            for prompt in prompts
            if (found := taken.get((name, prompt)))
        ]
        for name in configurations
    }


class SuiteWriter:
    """The results file of a suite, opened for resuming; a context manager.

    measured: requests in the file.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        options: Mapping[str, Mapping[str, Any]],
        prompts: Mapping[str, str],
        planned: int,
    ) -> None:
        """facts: common to all requests: model, machine, prompt set, number of repetitions …
        options: by configuration. prompts: texts by name. planned: number of requests.

        Raises OptionError for a folder that cannot be written or has results of another model,
        machine, compute mode, prompts or options, TraceFileError for one with other contents.
        """
        plan = strict_json(
            {
                "facts": dict(facts),
                "options": dict(options),
                "prompts": {
                    name: sha256(text.encode()).hexdigest() for name, text in prompts.items()
                },
            }
        )
        self._facts = facts
        self.measured: Measured = {}
        if is_database(results_file(folder)):
            known = read_results(folder)
            if known.facts.get("kind") == SUITE and _lasting(_plan_of(known)) != _lasting(plan):
                raise OptionError(
                    f"{folder} has results of another model or machine, other prompts or options.",
                    "Name another folder with --out.",
                )
            if known.facts.get("kind") == SUITE:
                self.measured = _measured(known)
        name = title(SUITE, str(facts["model"].get("name")))
        self._writer = ResultsWriter(folder, SUITE, name, planned, json.dumps(plan))
        self.path = self._writer.path

    def add(self, request: RequestResult, repeat: int) -> None:
        """Write a request. Raises OptionError if that fails."""
        settings, figures = suite_row(request.configuration, asdict(request))
        self.measured[request.configuration, request.prompt, repeat] = request
        machine = {**self._facts["environment"], "device": self._facts["device"]}
        del machine["date"]
        self._writer.add(
            key_of({**settings, "repeat": repeat}),
            len(self.measured),
            settings | ({"repeat": repeat} if repeat else {}),
            JobResult(figures=figures, machine=machine, model=self._facts["model"]),
            asdict(request),
        )

    def __enter__(self) -> SuiteWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()


def suite_result(
    facts: Mapping[str, Any],
    options: Mapping[str, Mapping[str, Any]],
    prompts: Iterable[str],
    measured: Measured,
    planned: int,
) -> dict[str, Any]:
    """The suite as one object, as `--json` prints it. options: by configuration."""
    return {
        "kind": SUITE_KIND,
        "version": SUITE_VERSION,
        "complete": len(measured) >= planned,
        **facts,
        "configurations": suite_report(options, medians(options, list(prompts), measured)),
    }


def read_result(path: Path) -> dict[str, Any]:
    """The results of a suite as one object, from a folder, the file in it, or JSON.

    Raises OptionError for a file that cannot be read or holds anything else, TraceFileError for a
    results file that is damaged.
    """
    if (found := find_results(path)) is not None and not kind_of_json(found):
        results = read_results(found)
        if results.facts.get("kind") != SUITE:
            raise _unusable(path)
        plan = _plan_of(results)
        facts, options, prompts = (_part(plan, name) for name in ("facts", "options", "prompts"))
        if PLAIN not in options:
            raise _unusable(path)
        return suite_result(facts, options, prompts, _measured(results), results.planned)
    return _read_json(path)


def _part(plan: dict[str, Any], name: str) -> dict[str, Any]:
    value = plan.get(name)
    return value if isinstance(value, dict) else {}


def _lasting(plan: dict[str, Any]) -> Any:
    """A plan without what may differ when a suite is resumed: the date, and the file's place."""
    return {
        **plan,
        "facts": _without(plan.get("facts"), ("date", "name", "modified_ns", "content")),
    }


def _without(value: Any, names: Collection[str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without(one, names) for name, one in value.items() if name not in names}


def _plan_of(results: ExperimentResults) -> dict[str, Any]:
    return json_object(results.path, results.facts.get("plan") or "{}")


def _measured(results: ExperimentResults) -> Measured:
    """The requests of a results file. Raises TraceFileError for invalid contents."""
    found: Measured = {}
    for row in range(results.n):
        detail = results.facts.get(f"detail {results.columns['key'][row]}")
        settings = results.settings(row)
        names = settings.get("configuration"), settings.get("prompt")
        repeat = settings.get("repeat", 0)
        if detail is None or not all(isinstance(n, str) for n in names) or type(repeat) is not int:
            raise wrong(results.path, row + 1, "detail", "is not a request of a suite")
        request = _request(results.path, row + 1, json_object(results.path, detail, row + 1))
        found[request.configuration, request.prompt, repeat] = request
    return found


def _request(path: Path, at: int, detail: dict[str, Any]) -> RequestResult:
    found: RequestResult = strictly(
        RequestResult, detail, lambda place, what: wrong(path, at, f"detail, {place}", what)
    )
    return found


def compare_results(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Two suites compared, as `bench compare --json` prints it: configurations of the same name,
    and where each file has one left over, these as well. Keys: pairs, only_a, only_b. Of a pair:
    a_name, b_name; aggregate: (a, b) by field; prompts: those in both files, with tokens per
    second, their ratio b / a, and acceptance rates."""
    of_a = {one["name"]: one for one in a["configurations"]}
    of_b = {one["name"]: one for one in b["configurations"]}
    pairs = [(name, name) for name in of_a if name in of_b]
    only_a = [name for name in of_a if name not in of_b]
    only_b = [name for name in of_b if name not in of_a]
    if len(only_a) == len(only_b) == 1:
        pairs.append((only_a.pop(), only_b.pop()))
    compared = [_pair(of_a[name], of_b[other]) for name, other in pairs]
    return {"pairs": compared, "only_a": only_a, "only_b": only_b}


def _pair(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    of_b = {row["name"]: row for row in b["rows"]}
    prompts = []
    for row in a["rows"]:
        if (other := of_b.get(row["name"])) is None:
            continue
        speed, other_speed = row["predicted_per_second"], other["predicted_per_second"]
        prompts.append(
            {
                "name": row["name"],
                "a_tok_s": speed,
                "b_tok_s": other_speed,
                "ratio": other_speed / speed if speed else None,
                "a_rate": row["accept_rate"],
                "b_rate": other["accept_rate"],
            }
        )
    fields = {name: (a["aggregate"][name], b["aggregate"][name]) for name in AGGREGATE_FIELDS}
    return {"a_name": a["name"], "b_name": b["name"], "aggregate": fields, "prompts": prompts}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        result = parse_json(user_text(path, _MOST_BYTES))
    except JsonError as error:
        raise _unusable(path, f" ({error})") from error
    strictly(_SuiteJson, result, lambda place, what: _unusable(path))
    return dict(result)


def _unusable(path: Path, why: str = "") -> OptionError:
    return OptionError(
        f"{path} is not a result file of `draftscope bench suite`{why}.", "Write one with --out."
    )


# enough for most widths to occur twice, which records their passes
_WARM_UP_TOKENS = 32


class PromptSuite:
    """Measures named prompts; `done` holds what is finished, also after an interruption.

    The first configuration must be Configuration.plain. repeats: requests of each kind, of which
    the one with the median time counts. Requests in `measured` are not repeated. Raises OptionError
    for two configurations of one name, and what Session.context raises for a prompt.
    """

    def __init__(
        self,
        session: Session,
        prompts: Sequence[tuple[str, Prompt]],
        configurations: Sequence[Configuration],
        *,
        repeats: int = 1,
    ) -> None:
        names = [configuration.name for configuration in configurations]
        if names[:1] != [PLAIN]:
            raise ValueError("the first configuration is not the plain one")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise OptionError(
                f"The configuration {twice[0]} is given twice.", "Give every one once."
            )
        session.context([prompt for _, prompt in prompts], configurations[0].options)
        self.prompts, self.configurations = list(prompts), list(configurations)
        self._session, self._repeats = session, repeats
        self.measured: Measured = {}

    @property
    def n_requests(self) -> int:
        """Number of requests that `requests` makes, without warm-up."""
        return len(self.prompts) * len(self.configurations) * self._repeats

    def warm_up(self) -> None:
        """A few tokens in every configuration, not counted. Raises what Session.start raises."""
        name, prompt = self.prompts[0]
        for configuration in self.configurations:
            few = shorter(configuration.options, _WARM_UP_TOKENS)
            measure_request(self._session, prompt, name, Configuration(configuration.name, few))

    def requests(self) -> Iterator[tuple[RequestResult, int]]:
        """Measure the rest; each request is in `measured` before it is yielded with its repetition
        number, from 0."""
        for number, (name, prompt) in enumerate(self.prompts):
            for repeat in range(self._repeats):
                first = (number + repeat) % len(self.configurations)
                for configuration in self.configurations[first:] + self.configurations[:first]:
                    key = configuration.name, name, repeat
                    if key not in self.measured:
                        found = measure_request(self._session, prompt, name, configuration)
                        self.measured[key] = found
                        yield found, repeat
