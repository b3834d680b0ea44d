"""The report on a suite: rows, aggregates, speed-ups, and where the time went.

Everything here is plain data, as it stands in the result file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engine.experiments.bench.request import PLAIN, Configuration, RequestResult


def suite_report(
    configurations: Sequence[Configuration], done: Mapping[str, Sequence[RequestResult]]
) -> list[dict[str, Any]]:
    """One object per configuration: name, options, aggregate, tokens_per_second, speed_up, split,
    num_same (requests whose tokens are those of plain decoding) and rows."""
    return [_configuration(one, done[one.name], done[PLAIN]) for one in configurations]


def aggregate_requests(requests: Sequence[RequestResult]) -> dict[str, Any]:
    """The totals that llama.cpp #22400's script prints: the rate to four decimals, None without a
    draft; the sum of the requests' wall times in seconds, to two."""
    drafted = sum(request.draft_n for request in requests)
    accepted = sum(request.draft_n_accepted for request in requests)
    return {
        "n_requests": len(requests),
        "total_predicted": sum(request.predicted_n for request in requests),
        "total_draft": drafted,
        "total_draft_accepted": accepted,
        "aggregate_accept_rate": round(accepted / drafted, 4) if drafted else None,
        "wall_s_total": round(sum(request.wall_s for request in requests), 2),
    }


def round_costs(
    requests: Sequence[RequestResult], plain: Sequence[RequestResult]
) -> dict[str, Any] | None:
    """Why a configuration is faster or slower than plain decoding; None where nothing is timed.

    Means over the rounds of all requests: tokens_per_round (emitted), drafted_per_round, and the
    milliseconds of drafting, verifying and the rest of a round. plain_step_ms: a token of plain
    decoding. A round pays when it emits more than break_even_tokens = round_ms / plain_step_ms,
    which takes an acceptance of break_even_acceptance = (break_even_tokens - 1) /
    drafted_per_round at the cost measured here; above 1 it cannot pay. None without a draft.
    """
    rounds = sum(request.num_rounds for request in requests)
    plain_step_ms = _ms_per_token(plain)
    if not rounds or not plain_step_ms:
        return None
    ms = sum(request.predicted_ms for request in requests)
    draft_ms = sum(request.draft_ms for request in requests)
    verify_ms = sum(request.verify_ms for request in requests)
    drafted = sum(request.draft_n for request in requests)
    break_even = ms / rounds / plain_step_ms
    return {
        "num_rounds": rounds,
        "tokens_per_round": sum(request.predicted_n - 1 for request in requests) / rounds,
        "drafted_per_round": drafted / rounds,
        "round_ms": ms / rounds,
        "draft_ms": draft_ms / rounds,
        "verify_ms": verify_ms / rounds,
        "rest_ms": (ms - draft_ms - verify_ms) / rounds,
        "plain_step_ms": plain_step_ms,
        "break_even_tokens": break_even,
        "break_even_acceptance": (break_even - 1) * rounds / drafted if drafted else None,
    }


def _configuration(
    configuration: Configuration, requests: Sequence[RequestResult], plain: Sequence[RequestResult]
) -> dict[str, Any]:
    plain_of = {request.prompt: request for request in plain}
    compared = [request for request in requests if request.prompt in plain_of]
    beside = [plain_of[request.prompt] for request in compared]
    per_token, plain_per_token = _ms_per_token(compared), _ms_per_token(beside)
    own = _ms_per_token(requests)
    rows = [_row(request, plain_of.get(request.prompt)) for request in requests]
    return {
        "name": configuration.name,
        "options": asdict(configuration.options),
        "aggregate": aggregate_requests(requests),
        "tokens_per_second": 1000 / own if own else None,
        "speed_up": plain_per_token / per_token if per_token and plain_per_token else None,
        "num_same": sum(row["same"] is True for row in rows),
        "split": round_costs(compared, beside),
        "rows": rows,
    }


def _row(request: RequestResult, plain: RequestResult | None) -> dict[str, Any]:
    known = asdict(request)
    del known["configuration"]
    timed = plain is not None and plain.predicted_per_second > 0
    return {
        "name": known.pop("prompt"),
        **known,
        "accept_rate": request.draft_n_accepted / request.draft_n if request.draft_n else None,
        "speed_up": request.predicted_per_second / plain.predicted_per_second
        if plain is not None and timed
        else None,
        "same": None if plain is None else request.tokens == plain.tokens,
    }


def _ms_per_token(requests: Sequence[RequestResult]) -> float | None:
    """The first token of a request is free."""
    timed = sum(request.predicted_n - 1 for request in requests)
    return sum(request.predicted_ms for request in requests) / timed if timed else None
