"""What counts of rounds are, where they are not what the rounds were."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.audit.recorded_drafts import RecordedDraft
from engine.errors import OptionError
from engine.observe.drafter_diff.diff import drafter_diff
from engine.observe.drafter_diff.outcome_causes import (
    _miscounted,
    cell_causes,
    file_causes,
    rule_cause,
    sampler_cause,
    width_cause,
    with_limits,
)
from engine.observe.drafter_diff.records import Cause, _dropped
from engine.observe.drafter_diff.sides import DraftSide
from engine.observe.files.importing import import_file
from engine.observe.rescoring.request_sampler import is_set_alike
from engine.trace.run_ref import RunRef
from engine.trace.store import TraceStore
from resources import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET

_TRUE = [(3, 3), (1, 3), (0, 3), (2, 3), (3, 3), (1, 2)]


@pytest.mark.parametrize(
    ("counted", "words"),
    [
        ([(4, 3), (2, 3), (1, 3), (3, 3), (4, 3), (2, 2)], "own token of a round"),
        (
            [(3, 3), (2, 4), (0, 3), (4, 5), (3, 3), (2, 3)],
            "replayed tokens after a rejection again and as drafted",
        ),
        ([(3, 3), (3, 5), (1, 4), (5, 6), (3, 3), (3, 4)], "and the target's own again"),
        ([(3, 3), (1, 2), (0, 1), (2, 3), (3, 3), (1, 2)], "fewer"),
        ([(1, 3), (1, 3), (0, 3), (1, 3), (1, 3), (1, 2)], "at most 1 accepted"),
        ([(0, 3), (0, 3), (0, 3), (0, 3), (0, 3), (0, 2)], "as accepted tokens none"),
        ([(2, 3), (0, 3), (0, 3), (1, 3), (2, 3), (0, 2)], "the accepted ones but one."),
        ([(0, 3), (3, 3), (1, 3), (0, 3), (2, 3), (3, 2)], "those of the previous round"),
        ([(3, 3), (3, 3), (0, 3), (2, 3), (3, 3), (2, 2)], "did not draft"),
        (
            [(2, 2), (0, 2), (0, 2), (1, 2), (2, 2), (0, 1)],
            "ones but one and as drafted tokens the drafted ones but one",
        ),
        ([(3, 0), (1, 2), (0, 3), (2, 1), (3, 0), (1, 1)], "as drafted tokens the rejected ones"),
        ([(3, 3), (4, 6), (4, 9), (6, 12), (9, 15), (10, 17)], "the sums of all rounds so far"),
    ],
)
def test_a_way_of_counting_is_named(counted: list[tuple[int, int]], words: str) -> None:
    assert words in f"{_miscounted([*zip(_TRUE, counted, strict=True)])}."


def test_whole_drafts_may_count_one_token_more() -> None:
    rounds = [((3, 3), (4, 3)), ((1, 3), (1, 3))]
    assert "own token after a full acceptance" in _miscounted(4 * rounds)


@pytest.mark.parametrize(("counted", "words"), [(2, "at most 2"), (1, "but the last one")])
def test_of_two_ways_the_one_that_fits_more_rounds_is_named(counted: int, words: str) -> None:
    assert words in _miscounted([*[((3, 3), (2, 3))] * 10, ((2, 2), (counted, 2))])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            lambda n, last: min(n, 1) if 0 < last < 3 else n,
            "at most 1 accepted token of a round, only after a partly acc",
        ),
        (lambda n, last: min(n, 2), "but the last one of fully accepted drafts"),
        (
            lambda n, last: max(0, n - 1) if last == 3 else n,
            "the accepted ones but one, only after a fully accepted draft",
        ),
        (lambda n, last: n - (n + last) % 3 if n > 1 else n, ": a stricter rule."),
    ],
)
def test_a_stricter_rule_is_named_with_the_rounds_that_it_holds_in(
    changed: Callable[[int, int], int], words: str
) -> None:
    right = [3, 2, 3, 0, 3, 3, 1, 3, 3, 2, 2, 3, 3, 0, 3, 1, 2, 3, 3, 3]
    text, drafts, last = [0], list[RecordedDraft](), 0
    for i, n in enumerate(right):
        last, n_right = changed(n, last), n
        tokens = [7] * n_right + [8] * (3 - n_right)
        drafts.append(RecordedDraft(i, len(text) - 1, tokens, [], last, 0, 0.0, 3))
        text += [7] * last + [7 if last < n_right else 9]
    facts = SimpleNamespace(synthetic="", draft_accept=None)
    side: Any = SimpleNamespace(name="B", draws=False, run=SimpleNamespace(facts=facts))
    side.drafts, side.text, side.starts = drafts, text, [one.pos0 for one in drafts]
    side.n_confirmed = partial(DraftSide.n_confirmed, side)
    side.advance = partial(DraftSide.advance, side)
    cause = rule_cause(side)
    assert cause is not None and words in cause.about
    assert cause.recorded is not None and cause.mended is not None
    assert cause.recorded < cause.mended


def test_widths_that_are_counted_as_drafted_tokens_are_named() -> None:
    found = [RecordedDraft(i, 4 * i, [7], [], 1, 0, 0.0, 1 + i % 5) for i in range(20)]
    counted = [one._replace(n_drafted=5) for one in found]
    more: dict[str, Any] = {"has_lengths": True, "looks_up": True, "counts": (20, 60)}
    both: list[Any] = [
        SimpleNamespace(name=name, drafts=drafts, has_rejected=name == "B", knows_all=False, **more)
        for name, drafts in (("A", counted), ("B", found))
    ]
    cause = width_cause(*both, [*zip(counted, found, strict=True)])
    assert cause is not None and (cause.stage, cause.side) == ("counting", "A")
    assert (cause.recorded, cause.mended) == ((20, 100), (20, 60))
    both[0].has_lengths = False
    assert width_cause(*both, [*zip(counted, found, strict=True)]) is None
    right = [one._replace(n_accepted=one.n_drafted) for one in found]
    both[0].drafts = [one._replace(n_drafted=one.n_drafted + 1) for one in right]
    both[1].drafts = right
    cause = width_cause(*both, [*zip(both[0].drafts, right, strict=True)])
    assert cause is not None and "the draft's root" in cause.about


def test_a_rejected_token_that_is_drawn_again_shows_no_residual() -> None:
    drafts = [RecordedDraft(i, 3 * i, [7, 8], [], 0, 0, 0.0, 2) for i in range(4)]
    store = SimpleNamespace(facts=SimpleNamespace(synthetic="", draft_accept=None))
    side: Any = SimpleNamespace(
        drafts=drafts, draws=True, run=store, name="B", n_confirmed=lambda _: 1, advance=lambda _: 0
    )
    cause = rule_cause(side)
    assert cause is not None and "not from the residual" in cause.about


def _started(name: str, limits: dict[str, Any] | None = None, **launch: list[str]) -> Any:
    facts = SimpleNamespace(server=SimpleNamespace(launch=launch) if launch else None)
    text = {"starts": (), "drafts": [], "text": [], "n_prompt": 0, "prompt": ()}
    run = SimpleNamespace(facts=facts)
    return SimpleNamespace(name=name, run=run, limits=limits or {}, **text)


def test_what_a_server_says_of_its_start_is_held_against_the_other() -> None:
    ropes = {"freq_base_train": ["10000.0"], "freq_base": ["800.0"]}
    ours, theirs = _started("A"), _started("B", k=["q4_0"], v=["f16"], **ropes)
    (rope,) = file_causes(ours, theirs, [], [])
    assert (rope.stage, rope.side) == ("positions", "B")
    assert "base 800.0, the given files 10000.0" in rope.about
    (cells,) = cell_causes(ours, theirs)
    assert (cells.stage, cells.side) == ("drafter state", "B")
    assert "as q4_0, the other's as f32" in cells.about
    alike = _started("A", k=["q4_0"], v=["q4_0"], **ropes)
    assert not [*file_causes(alike, theirs, [], []), *cell_causes(alike, theirs)]
    as_trained = _started("B", k=["f16"], **ropes | {"freq_base": ["10000.0"]})
    assert not [*file_causes(ours, as_trained, [], []), *cell_causes(ours, as_trained)]


def test_files_that_a_server_loaded_are_held_against_those_at_hand() -> None:
    files = [DEMO_TARGET, DEMO_DRAFT]
    sizes, ropes = ["9.05 MiB", "1.47 MiB"], ["10000.0"]
    ours, alike = _started("A"), _started("B", file_size=sizes, freq_base=ropes)
    draft = RecordedDraft(0, 4, [5], [], 1, 0, 0.0, 1)
    apart = [(draft, draft._replace(tokens=[6]))]
    assert not [*file_causes(ours, alike, apart, files)]
    assert not [*file_causes(ours, alike, apart, [*files, DEMO_EAGLE3])]  # one that is not needed
    other = _started("B", file_size=[sizes[0], "0.79 MiB"], freq_base=ropes)
    (cause,) = file_causes(ours, other, apart, files)
    assert (cause.stage, cause.side) == ("block", "B")
    assert "weights of 0.79 MiB, the given files 1.47 MiB" in cause.about
    assert not [*file_causes(ours, other, [(draft, draft)], files)]  # it drafts as the other does
    scaled = _started("B", file_size=sizes, freq_scale=["1", "0.125"])
    (cause,) = file_causes(ours, scaled, apart, files)
    assert cause.stage == "positions"


def test_rounds_in_which_none_was_accepted_may_be_left_out_of_what_is_counted() -> None:
    lengths = [2, *[3] * 11]  # equal ones may be those that a record assumes of all rounds
    all_of = [RecordedDraft(i, 4 * i, [], [], i % 3, 0, 0.0, n) for i, n in enumerate(lengths)]
    text: dict[str, Any] = {"text": [5] * 60, "prompt": (5,), "n_prompt": 1, "looks_up": False}
    text |= {"has_rejected": False, "reasons": set()}
    other: Any = SimpleNamespace(name="A", drafts=all_of, plain=[], **text)
    counted = [draft for draft in all_of if draft.n_accepted]
    plain = [draft.pos0 for draft in all_of if not draft.n_accepted]
    side: Any = SimpleNamespace(name="B", drafts=counted, plain=plain, counts=(12, 24), **text)
    (cause,) = _dropped(other, side, 50)
    assert (cause.stage, cause.side, cause.mended) == ("counting", "B", (12, 35))
    side.plain, side.drafts = plain[:-1], [*counted, all_of[9]]
    (cause,) = _dropped(other, side, 50)
    assert cause.stage == "candidates"


def test_other_limits_of_drafts_are_said() -> None:
    both = _started("A", {"n_max": 3, "p_min": 0.333}), _started("B", {"n_max": 5, "p_min": 0.33})
    (cause,) = with_limits(*both, [])
    assert (cause.stage, cause.side) == ("candidates", "")
    assert cause.about == "Drafts are made with other settings: n_max 3 in A, 5 in B."
    (shown,) = with_limits(*both, [Cause("candidates", "", "Longer.")])
    assert shown.about == "Longer. Settings: n_max 3 in A, 5 in B."
    (shown,) = with_limits(*both, [Cause("candidates", "", "Shorter: another p_min.")])
    assert shown.about == "Drafts end differently. Settings: n_max 3 in A, 5 in B."
    own = [Cause("candidates", "B", "The second best.")]
    assert with_limits(*both, own) == own
    ways = [_started("A", {"adapt": x, "tree": ()}) for x in ("none", "step")]
    (cause,) = with_limits(*ways, [])
    assert cause.about == "Drafts are made with other settings: adapt none in A, step in B."
    for way, shift in zip(ways, (0, 1), strict=True):  # of drafts that are alike, none is named
        way.text, way.starts = [5] * 40, range(0, 40, 4)
        way.drafts = [RecordedDraft(i, 4 * i, [5], [], 1, 0, 0.0, 1) for i in range(10)]
        assert with_limits(*ways, []) == [] or not shift
    ways[1].drafts = [one._replace(n_drafted=2) for one in ways[1].drafts[:4]]
    (cause,) = with_limits(*ways, [])
    assert cause.size == "10 of 10 rounds after the same text have other drafts"
    assert with_limits(both[0], both[0], []) == []


def test_limits_that_a_log_says_are_numbers() -> None:
    said = {"n_max": ["5"], "n_min": ["999999999"], "p_min": ["1.2.3"]}
    facts = SimpleNamespace(options=None, server=SimpleNamespace(launch=said))
    side: Any = SimpleNamespace(drafters=("draft-mtp",), run=SimpleNamespace(facts=facts))
    limits: Any = DraftSide.limits
    assert limits.fget(side) == {"n_max": 5}


# -- records of servers, without a model -------------------------------------------------------

_ACCEPTED = (3, 1, 0, 2, 3, 3, 0, 3, 1, 3, 3, 2)
_PROMPT, _N = [11, 12, 13], 1 + sum(n + 1 for n in _ACCEPTED)
_IDS = [*range(100, 100 + _N)]
_ENDS = [1 + sum(n + 1 for n in _ACCEPTED[:i]) for i in range(len(_ACCEPTED) + 1)]


def _sglang(
    *,
    rounds: bool = True,
    root: int = 0,
    own: int = 0,
    prefill: int = 0,
    sampling: dict[str, Any] | None = None,
) -> Any:
    """What /generate replies to a prompt of ids. root: drafted tokens that each round counts too
    many, own: accepted ones, prefill: rounds of the prompt that are counted."""
    steps = len(_ACCEPTED) + prefill
    about = {
        "id": "s",
        "finish_reason": {"type": "length"},
        "prompt_tokens": len(_PROMPT),
        "completion_tokens": _N,
        "spec_verify_ct": steps,
        "spec_accepted_drafts": sum(_ACCEPTED) + own * steps,
        "spec_proposed_drafts": (3 + root) * steps,
        "spec_accept_histogram": [_ACCEPTED.count(n) + prefill * (not n) for n in range(4)],
    }
    request = {"input_ids": _PROMPT, "sampling_params": sampling or {"temperature": 0}}
    if not rounds:
        return {"request": request, "body": {"text": "x", "output_ids": _IDS, "meta_info": about}}
    chunks = [
        {"text": "x" * n, "output_ids": _IDS[:n]}
        | {"meta_info": {"id": "s", "prompt_tokens": 3, "completion_tokens": n}}
        for n in _ENDS
    ]
    chunks[-1]["meta_info"] = about
    return {"request": request, "chunks": chunks}


def _vllm(accepted: list[int], drafted: list[int], prompt: list[int] = _PROMPT) -> Any:
    choices = [
        {"index": 0, "text": "x", "token_ids": _IDS[start:stop], "finish_reason": None}
        for start, stop in pairwise([0, *_ENDS])
    ]
    choices[0]["prompt_token_ids"], choices[-1]["finish_reason"] = prompt, "length"
    last = {"per_step_accepted": accepted, "per_step_drafted": drafted}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": _N}
    usage["total_tokens"] = len(prompt) + _N
    head = {"id": "c", "object": "text_completion", "model": "m"}
    events = [head | {"choices": [one]} for one in choices]
    events.append(head | {"choices": [], "usage": usage, "metrics": {"speculative_decoding": last}})
    request = {"prompt": "abc", "temperature": 0, "return_token_ids": True}
    return {"request": request, "chunks": events}


def _first(folder: Path, *records: Any) -> Cause | None:
    runs = []
    for i, record in enumerate(records):
        store, path = TraceStore(), folder / f"{i}.json"
        path.write_text(json.dumps(record))
        runs.append(RunRef(store, import_file(store, path)[0]))
    return drafter_diff(*runs).first


_RIGHT, _LENGTHS = [*_ACCEPTED], [3] * len(_ACCEPTED)


def test_the_stream_of_one_server_and_the_counts_of_another_agree(tmp_path: Path) -> None:
    assert _first(tmp_path, _vllm(_RIGHT, _LENGTHS), _sglang()) is None
    assert _first(tmp_path, _sglang(), _sglang()) is None
    # SGLang counts the rows of its batches, not how many tokens a look-up found
    found = [max(n, 1 + i % 3) for i, n in enumerate(_ACCEPTED)]
    assert _first(tmp_path, _vllm(_RIGHT, found), _sglang()) is None


@pytest.mark.parametrize(
    ("record", "stage", "words"),
    [
        (_sglang(root=1), "counting", "the draft's root"),
        (_sglang(rounds=False, root=1), "counting", "newest token of a round"),
        (_sglang(rounds=False, own=1), "counting", "the target's own token"),
        (_sglang(prefill=1), "counting", "one round more than its answer has"),
        (_vllm([n + 1 for n in _RIGHT], [4] * 12), "counting", "own token of a round"),
        (_vllm([0, *_RIGHT[:-1]], _LENGTHS), "counting", "of the previous round"),
        (
            _vllm([min(n, 2) for n in _RIGHT], _LENGTHS),
            "counting",
            "but the last one of fully accepted drafts",
        ),
        (_vllm(_RIGHT, _LENGTHS, [11, *_PROMPT]), "special tokens", "B has one more token"),
        (_vllm(_RIGHT, _LENGTHS, [11, 14, 13]), "tokens", "not known without the model"),
        (_sglang(sampling={"temperature": 0.7}), "acceptance rule", "temperature 0 in A, 0.7"),
    ],
)
def test_what_a_server_counts_otherwise_is_named(
    record: Any, stage: str, words: str, tmp_path: Path
) -> None:
    cause = _first(tmp_path, _vllm(_RIGHT, _LENGTHS), record)
    assert cause is not None and cause.stage == stage and words in cause.about, str(cause)


def test_sums_alone_are_refused_with_what_has_rounds(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="stream with ids"):
        _first(tmp_path, _vllm(_RIGHT, _LENGTHS), _sglang(rounds=False))


@pytest.mark.parametrize(
    ("name", "one", "other", "alike"),
    [
        ("min_p", 0.05, 0.05000000074505806, True),
        ("top_k", -1, 0, True),
        ("top_k", 40, 0, False),
        ("grammar", None, "", True),
        ("logit_bias", ((5, -1.0),), [{"token": 5, "bias": -1.0}], True),
        ("logit_bias", [], [[5, False]], False),
        ("samplers", ["top_k"], ["min_p"], False),
    ],
)
def test_a_setting_is_the_same_in_the_forms_of_two_servers(
    name: str, one: Any, other: Any, alike: bool
) -> None:
    assert is_set_alike(name, one, other) == is_set_alike(name, other, one) == alike


@pytest.mark.parametrize(
    ("other", "text", "said"),
    [("", [1, 2, 4], True), ("", [1, 2, 3], False), ("x", [1, 2, 4], False)],
)
def test_texts_that_part_by_their_seeds_are_named(other: str, text: list[int], said: bool) -> None:
    def run(engine: str) -> Any:
        source = SimpleNamespace(engine=engine) if engine else None
        return SimpleNamespace(facts=SimpleNamespace(source=source))

    common: dict[str, Any] = {"n_prompt": 1, "prompt": [1], "rule": None}
    a, b = (
        SimpleNamespace(
            setting={"temperature": 0.8, "seed": seed}, text=own, run=run(engine), **common
        )
        for seed, own, engine in ((3, [1, 2, 3], ""), (4, text, other))
    )
    found: Any = sampler_cause(a, b)  # type: ignore[arg-type]
    assert (found is not None) == said
    if said:
        assert "seed 3 in A, 4 in B" in found.about
