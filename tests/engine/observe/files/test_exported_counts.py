"""Counts as exporters, training runs and people write them down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.analysis.findings.check import find
from engine.errors import TraceFileError
from engine.observe.files.importing import import_file
from engine.observe.files.records.column_names import making_rates
from engine.trace.store import TraceStore

COUNTERS = [("drafts", 130), ("draft_tokens", 390), ("accepted_tokens", 260)]
PER_POS = [110, 85, 65]


def _read(tmp_path: Path, text: str, name: str = "kept") -> TraceStore:
    (tmp_path / name).write_text(text)
    store = TraceStore()
    import_file(store, tmp_path / name)
    return store


def _told(tmp_path: Path, text: str) -> dict[str, Any]:
    return dict(_read(tmp_path, text).runs[0].told or {})


def _points(values: list[int], is_added: bool) -> dict[str, Any]:
    points = [{"attributes": [], "asInt": str(one)} for one in values]
    return {"aggregationTemporality": 1 if is_added else 2, "dataPoints": points}


def _exported(is_added: bool) -> str:
    series = [
        {
            "name": f"vllm:spec_decode_num_{name}_total",
            "sum": _points([n // 2, n - n // 2] if is_added else [n // 2, n], is_added),
        }
        for name, n in COUNTERS
    ]
    return json.dumps({"resourceMetrics": [{"scopeMetrics": [{"metrics": series}]}]})


def _printed() -> str:
    labels = "{'model_name': 'm', 'engine': '0'}"
    lines = [
        f"Counter(name='vllm:spec_decode_num_{name}', labels={labels}, value={n})"
        for name, n in COUNTERS
    ]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    lines.append(f"Vector(name='{name}', labels={labels}, values={PER_POS})")
    return "[" + ",\n ".join(lines) + "]\n"


def _over_time() -> str:
    names = [
        f'"vllm:spec_decode_num_{name}_total{{engine=""0"", m=""q""}}"' for name, _ in COUNTERS
    ]
    rows = [
        f"2026-09-01 10:0{at}:00,{','.join(str(n * at // 3) for _, n in COUNTERS)}"
        for at in range(4)
    ]
    return "\n".join([",".join(['"Time"', *names]), *rows]) + "\n"


STATS = (
    "SpecDecodingStats(num_spec_tokens=3, num_drafts=130, num_draft_tokens=390, "
    f"num_accepted_tokens=260, num_accepted_tokens_per_pos={PER_POS})\n"
)


@pytest.mark.parametrize(
    ("text", "per_pos"),
    [
        (_exported(False), None),
        (_exported(True), None),
        (_printed(), PER_POS),
        (_over_time(), None),
        (STATS, PER_POS),
        (
            json.dumps({"draft_count": [130, 130, 130, 130], "accept_count": [130, *PER_POS]}),
            PER_POS,
        ),
    ],
    ids=["newest", "added", "printed", "over time", "object", "by step"],
)
def test_counters_in_other_writings(tmp_path: Path, text: str, per_pos: list[int] | None) -> None:
    told = _told(tmp_path, text)
    assert (told["num_spec_steps"], told["draft_n"], told["draft_n_accepted"]) == (130, 390, 260)
    assert told["num_accepted_tokens_per_pos"] == per_pos


def test_an_export_without_these_counters_gives_no_zeros(tmp_path: Path) -> None:
    text = _exported(False)
    cut = text[: text.index("dataPoints") + 60]
    with pytest.raises(TraceFileError, match=r"not valid JSON|no records"):
        _read(tmp_path, cut)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("Drafted:   390\nAccepted:  260\nAcceptance rate: 66.7%\n", (390, 260)),
        ("- **Accepted: 260**\n- **Drafted: 390**\n", (390, 260)),
        ("run A: accept=260/390 (66.7%) cycles=130 tok/cycle=3.00\n", (390, 260)),
        (
            "".join(
                json.dumps(
                    {"t/train/draft_num_draft_tokens": 195, "t/train/draft_num_accepted_tokens": n}
                )
                + "\n"
                for n in (120, 140)
            ),
            (390, 260),
        ),
    ],
)
def test_counts_that_people_write(tmp_path: Path, text: str, counts: tuple[int, int]) -> None:
    told = _told(tmp_path, text)
    assert (told["draft_n"], told["draft_n_accepted"]) == counts


def test_a_row_may_name_a_setting_and_a_rate(tmp_path: Path) -> None:
    store = _read(tmp_path, "n_max=1  acc=0.87  40.2 t/s\nn_max=2  acc=1.00  46.0 t/s\n")
    rows = store.runs[0].requests or []
    figures = [
        (one.place, one.told["draft_acceptance_rate"], one.told["predicted_per_second"])
        for one in rows
    ]
    assert figures == [("1", 0.87, 40.2), ("2", 1.0, 46.0)]
    assert all(one.told["num_draft_tokens"] is None for one in rows)


def test_a_row_of_a_table_at_chance_is_no_slot(tmp_path: Path) -> None:
    rows = "| greedy | 295 | 280 |\n| temp 0.7 | 387 | 0 |\n"
    store = _read(tmp_path, f"| sampling | drafted | accepted |\n|---|---|---|\n{rows}")
    found = find(store, [0])
    assert [one.rule for one in found] == ["acceptance-zero"]
    assert "row 2" in found[0].message
    assert found[0].seq_id == 1


def test_fastdeploys_accepted_tokens_are_all_that_were_emitted(tmp_path: Path) -> None:
    metrics = {
        "accepted_tokens": 128,
        "rejected_tokens": 112,
        "accept_ratio": 0.53125,
        "average_accept_length": 128 / 60,
        "accepted_tokens_per_head": [60, 36, 23, 9],
    }
    choice = {"index": 0, "message": {"content": "hi"}, "speculate_metrics": metrics}
    usage = {"prompt_tokens": 12, "completion_tokens": 128, "total_tokens": 140}
    told = _told(tmp_path, json.dumps({"choices": [choice], "usage": usage}))
    assert (told["num_spec_steps"], told["draft_n"], told["draft_n_accepted"]) == (60, 180, 68)
    assert (told["predicted_n"], told["num_accepted_tokens_per_pos"]) == (128, [36, 23, 9])


def test_columns_may_be_named_by_the_index_in_the_draft(tmp_path: Path) -> None:
    head = "| subset | acceptance_length | pos_0 | pos_1 | pos_2 |\n|---|---|---|---|---|\n"
    told = _told(tmp_path, f"{head}| code | 2.95 | 81.0% | 64.0% | 50.0% |\n")
    rows = told["acceptance_per_position"]
    assert rows is None or rows["unconditional"] == [0.81, 0.64, 0.5]
    store = _read(tmp_path, f"{head}| code | 2.95 | 81.0% | 64.0% | 50.0% |\n")
    one = (store.runs[0].requests or [])[0].told
    assert one["acceptance_per_position"]["unconditional"] == [0.81, 0.64, 0.5]


def test_a_part_of_a_line_of_vllm_has_its_drafts(tmp_path: Path) -> None:
    line = (
        "Mean acceptance length: 2.80, Accepted throughput: 27.00 tokens/s, Drafted throughput: "
        "45.00 tokens/s, Accepted: 270 tokens, Drafted: 450 tokens, Per-position acceptance rate: "
        "0.800, 0.600, 0.400, Avg Draft acceptance rate: 60.0%\n"
    )
    told = _told(tmp_path, line)
    assert (told["num_spec_steps"], told["draft_n"], told["draft_n_accepted"]) == (150, 450, 270)


def test_a_client_says_whose_server_it_measures(tmp_path: Path) -> None:
    kept = {"backend": "sglang", "total_output_tokens": 8000, "accept_length": 3.21}
    store = _read(tmp_path, json.dumps(kept) + "\n")
    assert [one.engine for one in store.runs[0].requests or ()] == ["sglang"]


def test_a_draft_is_a_setting_only_where_others_count(tmp_path: Path) -> None:
    steps = "".join(
        json.dumps({"step": i, "n_draft": 3, "n_accepted": i % 4}) + "\n" for i in range(8)
    )
    assert (_told(tmp_path, steps)["draft_n"], _told(tmp_path, steps)["draft_n_accepted"]) == (
        24,
        12,
    )
    whole = json.dumps({"n_draft": 8, "n_drafted": 320, "n_accepted": 160})
    assert _told(tmp_path, whole)["draft_n"] == 320


def test_an_engine_at_chance_among_others_is_named(tmp_path: Path) -> None:
    lines = []
    for _ in range(4):
        for engine, accepted in ((0, 150), (1, 0), (2, 140)):
            lines.append(
                f"(APIServer pid=7) INFO 09-12 10:00:00 [loggers.py:271] Engine {engine:03}: Avg "
                "prompt throughput: 0.0 tokens/s, Avg generation throughput: 10.0 tokens/s, Running"
            )
            lines.append(
                "(APIServer pid=7) INFO 09-12 10:00:00 [metrics.py:101] SpecDecoding metrics: Mean "
                f"acceptance length: {1 + accepted / 200:.2f}, Accepted: {accepted} tokens, Drafted"
                f": 200 tokens, Per-position acceptance rate: {accepted / 200:.3f}, Avg Draft "
                f"acceptance rate: {accepted / 2:.1f}%"
            )
    store = _read(tmp_path, "\n".join(lines) + "\n")
    found = find(store, [0])
    assert [one.rule for one in found] == ["acceptance-one-slot"]
    assert "engine 1" in found[0].message


@pytest.mark.parametrize(("names", "n"), [(("p0", "p1", "p10"), 3), (("all", "p50", "p99"), 1)])
def test_prompts_by_number_are_no_percentiles(
    tmp_path: Path, names: tuple[str, ...], n: int
) -> None:
    rows = "".join(f"| {name} | 120 | 80 |\n" for name in names)
    store = _read(tmp_path, f"| prompt | drafted | accepted |\n|---|---|---|\n{rows}")
    assert len(store.runs[0].requests or ()) == n


def test_statistics_of_one_drafter_have_shares_by_position(tmp_path: Path) -> None:
    lines = []
    before = (0, 0)
    for task, (n, accepted, shares) in enumerate(
        [(250, 561, "0.868, 0.744, 0.632"), (350, 761, "0.834, 0.714, 0.626")]
    ):
        a, d = accepted - before[1], 3 * (n - before[0])
        lines += [
            (
                f"I slot print_timing: id  3 | task {task} | draft acceptance = {a / d:.5f} ({a:5} "
                f"accepted / {d:5} generated), mean len = {1 + 3 * a / d:5.2f}"
            ),
            (
                f"I spec common_specu: statistics        draft-mtp: #calls(b,g,a) =    1 {n:6} "
                f"{n:6}, #gen drafts = {n:6}, #acc drafts =    217, #gen tokens = {3 * n:6}, #acc "
                f"tokens = {accepted:5}, #mean acc len = 3.24, #acc rate/pos = ({shares}), "
                "dur(b,g,a) = 0.002, 3828.419, 0.336 ms"
            ),
        ]
        before = n, accepted
    store = _read(tmp_path, "\n".join(lines) + "\n")
    rows = [one.told["num_accepted_tokens_per_pos"] for one in store.runs[0].requests or ()]
    assert rows == [[217, 186, 158], [75, 64, 61]]
    alone = _told(tmp_path, lines[1] + "\n")
    assert alone["num_accepted_tokens_per_pos"] == [217, 186, 158]


def test_formulas_are_no_row(tmp_path: Path) -> None:
    text = "* `mean_acceptance_length = 1 + a / n`, `acceptance_rate = accepted / drafted`\n"
    with pytest.raises(TraceFileError, match="is not recognised: it is not a log"):
        _read(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "pairs"),
    [
        ("9 of 20 drafts: 0.45", {(9, 20)}),
        ("9 of 19 drafts: 0.474", set()),  # so few make a rate by chance
        ("20 of 20, 100%", {(20, 20)}),
        ("9 of 20 drafts: 0.46", set()),
        ("9 of 20 drafts: 45.0 %", {(9, 20)}),
    ],
)
def test_counts_are_known_by_the_rate_that_they_make(
    line: str, pairs: set[tuple[int, int]]
) -> None:
    assert making_rates(line) == pairs


HEADS = {
    "fr": ("Jetons brouillon", "Jetons acceptés", "Taux d'acceptation"),
    "es": ("Tokens propuestos", "Tokens aceptados", "Tasa de aceptación"),
    "ja": ("ドラフトトークン数", "受理トークン数", "受理率"),
    "zh": ("草稿token数", "接受token数", "接受率"),
    "ko": ("초안 토큰 수", "수락 토큰 수", "수락률"),
}


@pytest.mark.parametrize("language", HEADS)
def test_counts_under_names_of_other_languages(tmp_path: Path, language: str) -> None:
    names, row = HEADS[language], ("1,200", "900", "75.0 %")
    table = "\n".join("\t".join(("code", *one)) for one in (names, row)) + "\n"
    lines = "".join(f"{name}\uff1a{n}\n" for name, n in zip(names, row, strict=True))
    for text in (table, lines):
        told = _told(tmp_path, text)
        assert (told["draft_n"], told["draft_n_accepted"]) == (1200, 900), text


@pytest.mark.parametrize("name", ["Gesamt", "Totaux", "合计", "Σ", "code Durchschnitt"])
def test_a_row_of_all_others_is_none_of_them(tmp_path: Path, name: str) -> None:
    rows = f"code;400;300\nprosa;200;100\n{name};600;400\n"
    told = _told(tmp_path, f"Prompt;Entworfen;Angenommen\n{rows}")
    assert (told["draft_n"], told["draft_n_accepted"]) == (600, 400)


def test_an_object_without_a_name_is_named_by_where_it_is(tmp_path: Path) -> None:
    """What has nothing else inside has the tokens and the speed of the same request."""
    results = {
        f"n_max={n}": {"acceptance": {"accepted": 3 * n, "drafted": 4 * n}, "tokens": 9, "tps": 2.5}
        for n in (20, 40)
    }
    mine = _read(tmp_path, json.dumps({"tokens": 1000, "results": results})).runs[0].requests or []
    assert [one.place for one in mine] == [f"results.n_max={n}.acceptance" for n in (20, 40)]
    assert [one.told["num_draft_tokens"] for one in mine] == [80, 160]
    assert {one.told["predicted_n"] for one in mine} == {9}
    assert {one.told["predicted_per_second"] for one in mine} == {2.5}


def test_a_request_with_null_for_its_counts_drafted_nothing_that_is_known(tmp_path: Path) -> None:
    records = [
        {"id": 1, "tokens": 200, "proposed": 240, "accepted": 132, "tps": 33.5},
        {"id": 2, "tokens": 180, "proposed": None, "accepted": None, "tps": 25.5},
        {"id": 3, "tokens": None, "proposed": None, "accepted": None, "tps": None},
    ]
    store = _read(tmp_path, "".join(json.dumps(one) + "\n" for one in records))
    mine = [one.told for one in store.runs[0].requests or []]
    names = "predicted_n", "predicted_per_second", "num_draft_tokens", "num_accepted_draft_tokens"
    figures = [tuple(one[name] for name in names) for one in mine]
    assert figures == [(200, 33.5, 240, 132), (180, 25.5, None, None)]


def test_mlx_may_not_count_its_rounds(tmp_path: Path) -> None:
    timings = {"predicted_n": 90, "predicted_ms": 1800.0, "draft_n": 60, "draft_n_accepted": 45}
    store = _read(tmp_path, json.dumps({"timings": {**timings, "draft_rounds": None}}))
    told = (store.runs[0].requests or [])[0].told
    assert (told["draft_n"], told["draft_n_accepted"], told["num_spec_steps"]) == (60, 45, None)
    assert store.runs[0].source and store.runs[0].source.engine == "mlx-vlm"


@pytest.mark.parametrize(
    ("row", "rates"),
    [
        ("80% | 45.5% | 25%", [0.8, 0.455, 0.25]),
        ("0.8 | 0.5 | 0", [0.8, 0.5, 0.0]),
        ("80% | n/a | 25%", None),
    ],
)
def test_shares_by_position_have_any_number_of_digits(
    tmp_path: Path, row: str, rates: list[float] | None
) -> None:
    """None of them is left out, so that those after it would be of another position."""
    head = "| p | drafted | accepted | pos 1 | pos 2 | pos 3 |\n|-|-|-|-|-|-|\n"
    store = _read(tmp_path, f"{head}| code | 300 | 150 | {row} |\n")
    told = (store.runs[0].requests or [])[0].told
    found = told["acceptance_per_position"]
    assert (found and found["unconditional"]) == rates
    assert not find(store)


def test_a_mark_before_a_row_is_not_its_name(tmp_path: Path) -> None:
    store = _read(tmp_path, "-- Draft: 512 tokens, accepted: 341 (66.60%)\n")
    assert [one.place for one in store.runs[0].requests or []] == ["line 1"]


def test_what_was_set_is_not_counted(tmp_path: Path) -> None:
    said = {"config": {"draft": 4, "accept": 0.9}, "stats": {"drafted": 100, "accepted": 60}}
    assert [one.place for one in _read(tmp_path, json.dumps(said)).runs[0].requests or []] == [
        "stats"
    ]


def test_a_name_may_be_around_the_counts(tmp_path: Path) -> None:
    records = [{"id": f"r{i}", "spec": {"accepted": 5, "proposed": 9}, "tokens": 12} for i in "12"]
    mine = _read(tmp_path, json.dumps(records)).runs[0].requests or []
    assert [(one.place, one.told["predicted_n"]) for one in mine] == [("r1", 12), ("r2", 12)]


@pytest.mark.parametrize("by", [",", ";"])
def test_cells_of_csv_may_have_a_comma_in_quotes(tmp_path: Path, by: str) -> None:
    rows = (
        ("name", '"draft tokens"', '"accepted tokens"', '"acceptance rate (%)"'),
        ('"a, b"', '"1,000"', '"650"', '"65.0"'),
    )
    store = _read(tmp_path, "\n".join(map(by.join, rows)) + "\n")
    (one,) = store.runs[0].requests or []
    assert one.place == "a, b"
    assert (one.told["draft_n"], one.told["draft_n_accepted"]) == (1000, 650)


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("Candidates: 120 applied, 30 accepted (25%)\n", 0),
        ("Candidates: 120 applied, 30 accepted (25%)\nwith n_max 3\n", 1),
    ],
)
def test_a_text_that_says_nothing_of_drafts_accepts_something_else(
    tmp_path: Path, text: str, n: int
) -> None:
    if n:
        assert len(_read(tmp_path, text).runs[0].requests or []) == n
        return
    with pytest.raises(TraceFileError, match="The format of"):
        _read(tmp_path, text)
