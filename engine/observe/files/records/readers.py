"""Readers of the records of other engines: by which keys a record is known, and its counts.

vLLM: docs/features/speculative_decoding/acceptance_metrics.md. Steps without a draft are not
counted; a draft may have lost all its tokens to a grammar.
SGLang: `meta_info` of /generate, `sglext.spec_tokens_details` elsewhere. The counts have had three
generations of names. Proposed drafts are verifications times the drafts that a verification can
have: an assumption of the server's, and not a count.
TensorRT-LLM: `speculative_decoding` of a choice, or of the performance metrics, a line for each
request; `specDecodingStats` of the iterations that /metrics lists.
mlx-vlm: `timings` with llama-server's names and the number of rounds. Accepted tokens may exceed
those emitted: a round counts before a stop cuts it.
Servers of the OpenAI API: `usage` with the tokens of a prediction that were accepted and rejected,
as TabbyAPI has them, or with those proposed and accepted, as servers of mlx-swift.
LM Studio: `stats` of a prediction, and fragments of text. What it calls ignored was never sent to
the target, so that it is not a drafted token here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.foreign import LONGEST_DRAFT, is_real
from engine.observe.files.records.column_names import NAMES
from engine.observe.files.records.document import Fields, Node
from engine.observe.files.records.request import TIMINGS, RecordedRequest

_KEY = re.compile(rb'"([A-Za-z][\w.:/]{1,80})"\s*:')


def of_same_request(node: Node) -> Hashable:
    """Equal for all chunks of a stream with counts: those of the last chunk are totals."""
    name: str | None = None
    for one in (node.values, *reversed(node.around)):
        if isinstance(one, list):
            return (id(one), name) if name is not None else id(node.values)
        if name is None and isinstance(one.get("id"), str):
            name = one["id"]
    return id(node.values)


@dataclass(frozen=True, slots=True)
class RecordShape:
    """Records of one engine, recognised by keys and never by file name.

    name: for --as. title: for messages. signs: sets of keys, one of which such an object has.
    without: keys that it never has. read: reads one such object. allows_null: whether null counts
    also make a record, of a request that drafted nothing or whose server does not count everything.
    """

    name: str
    title: str
    signs: tuple[tuple[str, ...], ...]
    read: Callable[[Node], RecordedRequest]
    without: tuple[str, ...] = ()
    request_of: Callable[[Node], Hashable] = of_same_request
    """Identifies the request, if several such objects may be of one; the last one counts."""
    allows_null: bool = False

    @property
    def keys(self) -> set[str]:
        """All keys of its signs."""
        return {key for sign in self.signs for key in sign}

    def sign_of(self, values: dict[str, Any]) -> tuple[str, ...]:
        """The keys by which an object is such a record; empty if it is not."""
        if not values.keys().isdisjoint(self.without):
            return ()
        for sign in self.signs:  # a stream has many others
            is_there = sign[0] in values and values.keys() >= {*sign}
            if is_there and (self.allows_null or None not in map(values.get, sign)):
                return sign
        return ()

    def has_counts(self, values: dict[str, Any]) -> bool:
        """Whether none of the keys that identify such a record is null."""
        return None not in map(values.get, self.sign_of(values))

    def may_be_in(self, keys: set[str]) -> bool:
        """Whether a file of such records may have these keys."""
        return keys.isdisjoint(self.without) and any(map(keys.issuperset, self.signs))


def keys_in(data: bytes) -> set[str]:
    """The keys of objects in bytes, or in their beginning."""
    # inside a JSON text the quotes would be escaped
    return {one.decode() for one in set(_KEY.findall(data))}


# -- what several engines have in common -----------------------------------------------------


def _by_length(values: Fields, key: str) -> dict[int, list[int]] | None:
    rows = values.object(key)
    if rows is None:
        return None
    return {rows.index(length): rows.histogram(length) or [] for length in rows.values}


_TAKES: dict[str, Callable[[Fields, str], Any]] = {
    "histogram": Fields.histogram,
    "by_length": _by_length,
    "per_step_accepted": partial(Fields.counts, most=LONGEST_DRAFT),
    "per_step_drafted": partial(Fields.counts, most=LONGEST_DRAFT),
}
"""How a request's field is read; the others are counts."""


def _counts(node: Node, engine: str, keys: Mapping[str, str]) -> tuple[RecordedRequest, Fields]:
    """A request with the counts of a record, and its fields for further reading. keys: the record's
    name of each field of the request."""
    values = node.fields()
    found = RecordedRequest(engine, node.place, record=dict(node.values))
    for field, key in keys.items():
        setattr(found, field, _TAKES.get(field, Fields.count)(values, key))
    return found, values


def read_usage(node: Node, reply: dict[str, Any], into: RecordedRequest) -> None:
    """Take `model` and the counts of `usage` of an OpenAI reply into a request, and check their
    sum."""
    about = node.fields(reply)
    into.model = about.text("model") or ""
    found = about.object("usage") if "usage" in reply else about
    if found is None:
        return
    for name in ("prompt", "completion"):  # TabbyAPI's
        speed = found.values.get(f"{name}_tokens_per_sec")
        if is_real(speed):
            into.timings[f"{name.replace('completion', 'predicted')}_per_second"] = speed
    names = "prompt_tokens", "completion_tokens", "total_tokens"
    prompt, completion, total = map(found.count, names)
    details = found.object("prompt_tokens_details")
    cached = details.count("cached_tokens") if details is not None else None
    choices = reply.get("choices")
    is_one = not isinstance(choices, list) or len(choices) < 2  # otherwise the sum of several
    into.set_tokens(prompt, cached, completion if is_one else None)
    _check_total(into, names, prompt, completion, total, of="usage.")


def _check_total(
    found: RecordedRequest, names: Sequence[str], *counts: int | None, of: str = ""
) -> None:
    """Check that two counts of tokens, if present, add up to the last one. of: their owner."""
    prompt, completion, total = counts
    if prompt is not None and completion is not None and total is not None:
        found.check(
            prompt + completion == total,
            [of + name for name in names],
            f"{names[0]} and {names[1]} give {prompt + completion:,}, but {names[2]} is {total:,}",
        )


# -- vLLM ------------------------------------------------------------------------------------

_VLLM_KEYS = NAMES["keys"]["vllm"]


def read_acceptance(node: Node, engine: str) -> tuple[RecordedRequest, Fields]:
    """vLLM's `metrics.speculative_decoding` of a reply or of a stream's last chunk, which AIPerf
    writes with equal names; with the fields for further reading."""
    found, values = _counts(node, engine, _VLLM_KEYS)
    mean, rate = values.number("mean_acceptance_length"), values.number("draft_acceptance_rate")
    # missing counts that are sums of given lists
    if found.per_step_accepted is not None:
        if found.num_spec_steps is None:
            found.num_spec_steps = len(found.per_step_accepted)
        if found.num_accepted_draft_tokens is None:
            found.num_accepted_draft_tokens = sum(found.per_step_accepted)
    if found.per_step_drafted is not None and found.num_draft_tokens is None:
        found.num_draft_tokens = sum(found.per_step_drafted)
    found.check_rate("mean_acceptance_length", mean, _VLLM_KEYS, own=1)
    found.check_rate("draft_acceptance_rate", rate, _VLLM_KEYS)
    found.check_counts(_VLLM_KEYS)
    return found, values


def _read_vllm(node: Node) -> RecordedRequest:
    found, _ = read_acceptance(node, "vllm")
    read_usage(node, node.owner("usage", "choices"), found)
    return found


VLLM = RecordShape(
    "vllm",
    "vLLM",
    (("num_spec_steps", "mean_acceptance_length"), ("per_step_accepted",)),
    _read_vllm,
    without=("engine", "predicted_n"),  # AIPerf's, and this program's own figures
)

# -- SGLang ----------------------------------------------------------------------------------


_SINCE_START = "avg_spec_accept_length"


def _read_sglang(node: Node) -> RecordedRequest:
    """A request, or the average in a server's /get_server_info."""
    if _SINCE_START in node.values:
        found = RecordedRequest("sglang", node.place)
        if (length := node.fields().number(_SINCE_START)) is not None:
            found.given["mean_acceptance_length"] = length
        return found
    keys = {"num_spec_steps": "spec_verify_ct"}
    found, values = _counts(node, "sglang", keys)

    for field, names in NAMES["generations"]["sglang"].items():
        take = _TAKES.get(field, Fields.count)
        named = [(name, value) for name in names if (value := take(values, name)) is not None]
        keys[field] = named[0][0] if named else names[0]
        for name, value in named:  # older names next to the newest must agree
            setattr(found, field, named[0][1])
            found.check(
                value == named[0][1],
                (named[0][0], name),
                f"{named[0][0]} and {name}, its name in other versions, differ",
            )
    if found.histogram == []:
        found.histogram = None
    found.derived = ("num_draft_tokens", "draft_n", "draft_acceptance_rate")
    reply = node.owner("usage", "meta_info", "choices")
    if "completion_tokens" in node.values:
        found.set_tokens(
            *map(values.count, ("prompt_tokens", "cached_tokens", "completion_tokens"))
        )
    else:
        read_usage(node, reply, found)
    rate, length = values.number("spec_accept_rate"), values.number("spec_accept_length")
    found.check_rate("spec_accept_rate", rate, keys)
    emitted, steps = found.timings.get("predicted_n"), found.num_spec_steps
    for name, given, of in (
        ("draft_acceptance_rate", rate, found.num_draft_tokens),
        ("mean_acceptance_length", length, steps),
    ):
        if given is not None and None in (found.num_accepted_draft_tokens, of):
            found.given[name] = given
    names = "completion_tokens", "spec_verify_ct"
    found.check_ratio("spec_accept_length", length, emitted, steps, *names)
    found.check_counts(keys)
    reason = node.values.get("finish_reason")
    found.stop = str(reason.get("type", ""))[:100] if isinstance(reason, dict) else ""
    return found


SGLANG = RecordShape(
    "sglang",
    "SGLang",
    (("spec_verify_ct",), (_SINCE_START,)),
    _read_sglang,
    request_of=lambda node: (
        id(node.values) if _SINCE_START in node.values else of_same_request(node)
    ),
)

# -- TensorRT-LLM ----------------------------------------------------------------------------

_TENSORRT_KEYS = NAMES["keys"]["tensorrt-llm"]


def _read_tensorrt_llm(node: Node) -> RecordedRequest:
    if _ITERATION[0] in node.values:
        return _read_iteration(node)
    found, values = _counts(node, "tensorrt-llm", _TENSORRT_KEYS)
    found.check_rate("acceptance_rate", values.number("acceptance_rate"), _TENSORRT_KEYS)
    found.check_counts(_TENSORRT_KEYS)
    read_usage(node, node.owner("usage", "perf_metrics"), found)
    choice = node.owner("finish_reason")
    if choice is not node.values:
        found.stop = node.fields(choice).text("finish_reason") or ""
    return found


_ITERATION = ("numDraftTokens", "numAcceptedTokens")


def _read_iteration(node: Node) -> RecordedRequest:
    """`specDecodingStats` of an iteration: one for each request with a draft."""
    fields = "num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps"
    keys = dict(zip(fields, (*_ITERATION, "numRequestsWithDraftTokens"), strict=True))
    found, values = _counts(node, "tensorrt-llm", keys)
    values.number("acceptanceLength")
    found.stop = "interval"
    found.check_counts(keys)
    return found


TENSORRT_LLM = RecordShape(
    "tensorrt-llm",
    "TensorRT-LLM",
    (("total_accepted_draft_tokens",), _ITERATION),
    _read_tensorrt_llm,
    without=("total_spec_decode_steps",),  # AIPerf's
)

# -- mlx-vlm ---------------------------------------------------------------------------------

_MLX_KEYS = NAMES["keys"]["mlx-vlm"]


def _read_timings(node: Node) -> RecordedRequest:
    """mlx-vlm's, a shortened copy of llama-server's, or those of others with its names but no
    times."""
    own = "llama-server" if "predicted_ms" in node.values else ""
    engine = "mlx-vlm" if "draft_rounds" in node.values else own
    found, values = _counts(node, engine, _MLX_KEYS)
    takes = ((name, values.count if name[-2:] == "_n" else values.number) for name in TIMINGS)
    found.timings |= {name: one for name, take in takes if (one := take(name)) is not None}
    found.check_counts(_MLX_KEYS)
    values.text("draft_kind")
    return found


MLX_VLM = RecordShape("mlx-vlm", "mlx-vlm", (("draft_rounds",),), _read_timings, allows_null=True)

# -- LM Studio -------------------------------------------------------------------------------

_PREDICTION = tuple(
    f"{one}DraftTokensCount" for one in ("accepted", "rejected", "ignored", "total")
)
_REPLY = tuple(f"{one}_draft_tokens_count" for one in ("accepted", "rejected", "ignored", "total"))
_OF_PREDICTION = (
    *("promptTokensCount", "predictedTokensCount", "totalTokensCount"),
    *("tokensPerSecond", "stopReason"),
)
_OF_REPLY = (
    *("prompt_tokens", "completion_tokens", "total_tokens"),
    *("tokens_per_second", "stop_reason"),
)
_OF_PYTHON = tuple(re.sub("(?=[A-Z])", "_", one).lower() for one in _OF_PREDICTION)
"""Names in its libraries, and in its own replies, which have them in `usage` or in `stats`."""


def _prediction_of(node: Node) -> int:
    """The counts of a fragment's prediction; without any, the fragments."""
    if _PREDICTION[0] in node.values:
        return id(node.values)
    if _REPLY[0] in node.values:
        return id(node.owner("usage") or node.values)
    stats = node.owner("stats").get("stats")
    return id(stats if isinstance(stats, dict) or not node.around else node.around[-1])


def _read_lm_studio(node: Node) -> RecordedRequest:
    """A prediction, or the counts of a reply, which has its tokens in `usage` and the rest in
    `stats`."""
    values, found = node.fields(), RecordedRequest("lm-studio", node.place)
    is_counted, is_python = _REPLY[0] in node.values, _OF_PYTHON[1] in node.values
    if not is_counted and _PREDICTION[0] not in node.values:
        stats = node.fields(node.owner("stats")).object("stats")
        if stats is None:
            return _read_fragments(node, found)
        values, found.place = stats, stats.place
    _read_drafts(values, _REPLY if is_counted else _PREDICTION, found)
    found.record = dict(values.values)
    is_reply = is_counted and not is_python
    reply = node.fields(node.owner("usage")) if is_reply else None
    usage, about = (values, values) if reply is None else map(reply.object, ("usage", "stats"))
    *names, speed, stop = _OF_PYTHON if is_python else _OF_REPLY if is_reply else _OF_PREDICTION
    if usage is not None:
        prompt, predicted, both = map(usage.count, names)
        found.set_tokens(prompt, None, predicted)
        _check_total(found, names, prompt, predicted, both)
    if about is not None:
        if (per_second := about.number(speed)) is not None:
            found.timings["predicted_per_second"] = per_second
        found.stop = about.text(stop) or ""
    return found


def _read_drafts(values: Fields, names: Sequence[str], into: RecordedRequest) -> None:
    accepted, rejected, ignored, total = map(values.count, names)
    into.num_accepted_draft_tokens = accepted
    if accepted is not None and rejected is not None:
        into.num_draft_tokens = accepted + rejected
        into.derived = ("num_draft_tokens", "draft_n")
        if total is not None:
            parts = accepted + rejected + (ignored or 0)
            into.check(
                parts == total,
                [names[i] for i in (3, 0, 1, 2)],
                f"{names[3]} is {total:,}, but its parts add up to {parts:,}",
            )
    elif accepted is not None and total is not None:
        into.check(
            accepted <= total,
            (names[0], names[3]),
            f"{names[0]} is {accepted:,}, more than {names[3]}, {total:,}",
        )


def _read_fragments(node: Node, into: RecordedRequest) -> RecordedRequest:
    """Fragments alone give the number of tokens."""
    fragments = node.around[-1] if node.around and isinstance(node.around[-1], list) else []
    counts = [
        Fields(one, node.file, f"{node.place} or after it", node.taken).count("tokensCount")
        for one in fragments
        if isinstance(one, dict)
    ]
    if None not in counts:
        into.set_tokens(None, None, sum(filter(None, counts)))
    return into


LM_STUDIO = RecordShape(
    "lm-studio",
    "LM Studio",
    ((_PREDICTION[0],), (_REPLY[0],), ("containsDrafted",)),
    _read_lm_studio,
    request_of=_prediction_of,
)

# -- llama-server ----------------------------------------------------------------------------

LLAMA_SERVER = RecordShape(
    "llama-server",
    "llama-server",
    (("predicted_n", "predicted_ms"), ("predicted_n", "predicted_per_second")),
    _read_timings,
    without=("draft_rounds", "predicted_per_second_n_gen"),  # mlx-vlm's, this program's own
)
"""Its replies, and complete timings, are read as from the server: see `writing`."""

# -- usage -----------------------------------------------------------------------------------

_PREDICTED = "accepted_prediction_tokens", "rejected_prediction_tokens"
_PROPOSED = "proposed_tokens", "accepted_tokens"
_ATTEMPTS = "attempts", "accepted", "rejected"
"""Of vllm-mlx's /v1/status, which drafts one token at a time."""
_OF_BENCH = "latency_s"
"""Of llama.cpp's speed_bench.py."""
_COUNTED = (_PREDICTED, _PROPOSED, _ATTEMPTS, ("draft_n", "draft_n_accepted"))


def _read_prediction(node: Node) -> RecordedRequest:
    """Counts inside `usage`."""
    values, found = node.fields(), RecordedRequest("", node.place, record=dict(node.values))
    is_predicted, is_bench = _PREDICTED[0] in node.values, _OF_BENCH in node.values
    names = next(two for two in _COUNTED if two[0] in node.values)
    one, other = map(values.count, names[:2])
    found.num_draft_tokens, found.num_accepted_draft_tokens = one, other
    if is_bench and not one:  # also if the server does not report it
        found.num_draft_tokens = found.num_accepted_draft_tokens = None
    times = ((name, values.number(name)) for name in ("prompt_ms", "predicted_ms"))
    found.timings |= {name: ms for name, ms in times if ms is not None}
    found.stop = values.text("finish_reason") or ""
    if is_predicted:
        found.num_draft_tokens = None if one is None or other is None else one + other
        found.num_accepted_draft_tokens = one
        found.derived = ("num_draft_tokens", "draft_n")
    found.check_counts({"num_draft_tokens": names[0], "num_accepted_draft_tokens": names[1]})
    read_usage(node, node.owner("usage", "completion_tokens"), found)
    return found


USAGE = RecordShape(
    "usage",
    "the OpenAI API",
    _COUNTED,
    _read_prediction,
    without=("predicted_n", "draft_rounds", "num_draft_tokens"),
)

READERS = (VLLM, SGLANG, TENSORRT_LLM, MLX_VLM, LM_STUDIO, USAGE)
"""Readers for replies."""
