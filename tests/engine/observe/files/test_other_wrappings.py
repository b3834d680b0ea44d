"""What viewers of logs, browsers, exporters and boards make of a log, a reply or a table."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.analysis.findings.check import recorded
from engine.observe.files.importing import import_file
from engine.trace.store import TraceStore

Told = list[dict[str, Any]]
Read = Callable[[str | bytes], Told]
SUMS = (
    (
        "slot print_timing: id  0 | task {0} | prompt eval time =     300.00 ms /   100 tokens "
        "(    3.00 ms per token,   333.33 tokens per second)"
    ),
    (
        "slot print_timing: id  0 | task {0} |        eval time =    5000.00 ms /   {1} tokens "
        "(   16.67 ms per token,    60.00 tokens per second)"
    ),
    (
        "slot print_timing: id  0 | task {0} | draft acceptance = 0.63333 (  190 accepted /   300 "
        "generated), mean len =  2.90"
    ),
)
LINES = [line.format(task, n) for task, n in ((1, 300), (2, 310)) for line in SUMS]
TIMES = [f"2026-11-20T14:03:{10 + i}.118Z" for i in range(len(LINES))]
TIMINGS = {"prompt_n": 31, "prompt_ms": 88.1, "predicted_n": 200, "predicted_ms": 3000.0}
TIMINGS |= {"draft_n": 180, "draft_n_accepted": 120}
REPLY = json.dumps(
    {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}], "timings": TIMINGS},
    indent=2,
)
LAST = {"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": TIMINGS}
STREAM = f"data: {json.dumps(LAST)}\n\ndata: [DONE]\n\n"
COUNTERS = {"drafts": 400, "draft_tokens": 1200, "accepted_tokens": 760}
SERIES = {f"vllm:spec_decode_num_{name}_total": n for name, n in COUNTERS.items()}


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The figures of each request of a text, about which nothing is found."""

    def read(text: str | bytes) -> Told:
        store, path = TraceStore(), tmp_path / "brought"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        runs = import_file(store, path)
        assert not recorded(store)
        return [one["told"] for run in runs for one in store.runs[run]["requests"]]

    return read


def _rows(newest_first: bool) -> str:
    rows = [{"line": a, "timestamp": b} for a, b in zip(LINES, TIMES, strict=True)]
    return json.dumps(rows[::-1] if newest_first else rows)


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"{a}\t{b}" for a, b in reversed([*zip(TIMES, LINES, strict=True)])),
        "\n".join(reversed(LINES)),
        "\n".join(LINES),
        _rows(newest_first=True),
        _rows(newest_first=False),
        json.dumps([{"message": a, "@timestamp": 1763647402118 - i}
                    for i, a in enumerate(reversed(LINES))]),
        "<div class='a'><span>2:03 PM</span><div>" + "<br>".join(LINES) + "</div></div>",
        "\n".join(["section_start:1763647402:step\r", *LINES]).replace("\r\n", "\r", 1),
    ],
    ids=["a viewer", "bare", "in order", "rows", "rows in order", "numbers", "page", "progress"],
)  # fmt: skip
def test_requests_are_in_the_order_in_which_they_were(text: str, read: Read) -> None:
    if text.startswith("section"):
        text = text.replace("\rslot", f"\r{TIMES[0]} slot").replace("\nslot", f"\n{TIMES[1]} slot")
    told = read(text + "\n")
    names = "predicted_n", "prompt_ms", "draft_n_accepted"
    assert [tuple(map(one.get, names)) for one in told] == [(300, 300.0, 190), (310, 300.0, 190)]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"log": {"entries": [{"response": {"content": {"text": REPLY}}}]}}),
        json.dumps({"log": {"entries": [{"request": {"postData": {"text": '{"model": "q"}'}},
                    "text": base64.b64encode(STREAM.encode()).decode(), "encoding": "base64"}]}}),
        json.dumps(json.dumps(json.loads(REPLY))),
        "id,reply\n1,\"" + json.dumps(json.loads(REPLY)).replace('"', '""') + '"\n',
        f'time=14:03:22 level=INFO msg="done" body={json.dumps(json.dumps(json.loads(REPLY)))}\n',
        f"2026-11-20 14:03:22,118 - bench - INFO - run 1 timings={TIMINGS}\n",
        f"2026-11-20 14:03:22,118 INFO run 1: {json.dumps(TIMINGS)}\n",
        "timings:\n" + "".join(f"  {name}: {value}\n" for name, value in TIMINGS.items()),
    ],
    ids=["HAR", "base64", "text", "CSV", "quoted", "Python", "after a prefix", "YAML"],
)  # fmt: skip
def test_a_reply_within_something_else(text: str, read: Read) -> None:
    names = "predicted_n", "draft_n", "draft_n_accepted", "predicted_ms"
    assert [tuple(map(one.get, names)) for one in read(text)] == [(200, 180, 120, 3000.0)]


def _long(newest_first: bool) -> str:
    rows = [
        f"2026-11-20 14:0{at}:00,{name},0,{n * at // 4}"
        for at in range(5)
        for name, n in SERIES.items()
    ]
    return "\n".join(["Time,__name__,engine,Value", *(rows[::-1] if newest_first else rows), ""])


@pytest.mark.parametrize(
    "text",
    [
        _long(newest_first=False),
        _long(newest_first=True),
        '"Field","Last *","Max"\n' + "".join(
            f'"{name}{{engine=""0"", job=""a,b""}}",{n},9999\n' for name, n in SERIES.items()),
        "".join(f'{name}{{engine="0"}}\n{n}\n' for name, n in SERIES.items()),
    ],
    ids=["rows", "newest first", "reduced", "values below"],
)  # fmt: skip
def test_series_in_rows_of_a_table(text: str, read: Read) -> None:
    names = "num_spec_steps", "draft_n", "draft_n_accepted"
    assert [tuple(map(one.get, names)) for one in read(text)] == [(400, 1200, 760)]


@pytest.mark.parametrize(
    "text",
    [
        (
            "[table]\n[tr][th]run[/th][th]drafted[/th][th]accepted[/th][/tr]\n"
            "[tr][td]a[/td][td]500[/td][td]200[/td][/tr]\n[/table]\n"
        ),
        (
            "\\begin{tabular}{lrr}\n\\toprule\nRun & Drafted & Acceptance \\\\\n\\midrule\n"
            "a & 500 & 40.0\\% \\\\\n\\bottomrule\n\\end{tabular}\n"
        ),
        "   prompt  draft_n  draft_n_accepted\n0    code      500               200\n",
        "run_id,key,value,timestamp\na,drafted,500,1763647402118\na,accepted,200,1763647402119\n",
        "| prompt | acc/draft |\n|---|---|\n| code | 200/500 (40.0%) |\n",
        '"Step","k3 - rollout/spec_accept_rate"\n"10","0.4"\n',
        "接受率：40%\n生成速度：58.6 tok/s\n",
        "Drafted: 5'000\nAccepted: 2'000\nAcceptance rate: 40.0 %\n",
    ],
    ids=["board", "LaTeX", "pandas", "names in rows", "pair", "W&B", "other scripts", "thousands"],
)
def test_tables_and_lines_of_other_kinds(text: str, read: Read) -> None:
    (told,) = read(text)
    assert told["draft_acceptance_rate"] == pytest.approx(0.4)
    drafted = told.get("draft_n")
    assert drafted is None or drafted == (5000 if "'" in text else 500)


def test_what_training_runs_and_benchmarks_keep_has_lengths_and_shares(read: Read) -> None:
    (told,) = read('{"rollout/spec_accept_rate": 0.58, "rollout/spec_accept_length": 2.74}\n')
    assert (told["draft_acceptance_rate"], told["mean_acceptance_length"]) == (0.58, 2.74)
    bench = {f"spec_decode_{name}": n for name, n in COUNTERS.items()}
    bench |= {"spec_decode_num_drafts": 400, "output_throughput": 30.5}
    bench |= {"spec_decode_per_position_acceptance_rates": [0.8, 0.65, 0.45]}
    (told,) = read(json.dumps(bench))
    assert told["num_accepted_tokens_per_pos"] == [320, 260, 180]
    (told,) = read(" -- Response: 512 tokens, 44.20 tokens/second, 301/420 draft tokens accepted\n")
    assert (told["draft_n"], told["predicted_per_second"]) == (420, 44.2)
