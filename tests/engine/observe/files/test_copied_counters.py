"""Counters and objects of engines, as people copy them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.analysis.findings.check import find
from engine.errors import TraceFileError
from engine.observe.files.importing import import_file
from engine.trace.store import TraceStore
from tests.engine.observe.files.pasted_text import SUMS, imported, read, rules, sums

TABLE = """<details>
$ curl -s http://h:8000/metrics | grep spec
vllm:spec_decode_num_drafts_total{engine="0"} | 22
-- | --
vllm:spec_decode_num_draft_tokens_total{engine="0"} | 66
| vllm:spec_decode_num_accepted_tokens_total{engine="0"} | 10 |
"""


def test_counters_in_a_table_are_counters(tmp_path: Path) -> None:
    store = imported(tmp_path, TABLE.partition("\n")[2].partition("\n")[2])
    assert sums(store) == [(None, 22, 66, 10)]
    store = imported(tmp_path, TABLE)
    assert sums(store) == [(None, 22, 66, 10)]
    assert not rules(store)
    rows = [f"| {row.strip('| ')} |\n" for row in TABLE.splitlines() if "_total" in row]
    assert sums(imported(tmp_path, "".join(rows))) == [(None, 22, 66, 10)]


@pytest.mark.parametrize(
    "before", ["> ", "    ", "12:", "\ufeff", "\x1b[01;31m\x1b[K", "vllm-1  | "]
)
def test_what_stands_before_counters(tmp_path: Path, before: str) -> None:
    rows = [line.strip("| ").replace("|", "") for line in TABLE.splitlines() if "_total" in line]
    store = imported(tmp_path, "".join(f"{before}{row}\n" for row in rows))
    assert sums(store) == [(None, 22, 66, 10)]


def test_values_that_a_person_has_left_out_are_not_there(tmp_path: Path) -> None:
    text = """{ "choices": [ ... ], "usage": {...}, "metrics": {"speculative_decoding":
      {"mean_acceptance_length": 1.5, "num_spec_steps": 20, "num_draft_tokens": 60,
       "num_accepted_draft_tokens": 10, "acceptance_histogram": [12, 6, 2, 0]}}}"""
    assert sums(imported(tmp_path, text)) == [(None, 20, 60, 10)]


def test_counters_of_rapid_mlx(tmp_path: Path) -> None:
    labels = 'family="qwen",method="mtp"'
    counts = {"attempts": 6, "accepts": 4, "verify_calls": 2, "bonus_tokens": 1}
    lines = [f"rapid_mlx_spec_decode_{k}_total{{{labels}}} {n}" for k, n in counts.items()]
    for depth, n in enumerate((2, 1, 1), 1):
        name = "rapid_mlx_spec_decode_accepted_by_depth_total"
        lines.append(f'{name}{{{labels},depth="{depth}"}} {n}')
    lines.append(f"rapid_mlx_spec_decode_accept_ratio{{{labels}}} 0.667")
    lines.append('rapid_mlx_spec_decode_dflash_attempts_total{family="qwen"} 99')
    path = tmp_path / "metrics.txt"
    path.write_text("\n".join(lines) + "\n")
    store = TraceStore()
    import_file(store, path)
    summary = store.runs[0]["summary"]
    assert [summary[name] for name in SUMS] == [None, 2, 6, 4]
    assert summary["num_accepted_tokens_per_pos"][:3] == [2, 1, 1] and not find(store)


STATISTICS = (
    "statistics        draft-mtp: #calls(b,g,a) =    1    {0}    {0}, #gen drafts =    {0}, "
    "#acc drafts =    9, #gen tokens =    {1}, #acc tokens =    {2}, dur(b,g,a) = 0.1, 7.1, 0.2\n"
)


def test_totals_of_drafters_alone_are_a_run(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(STATISTICS.format(10, 30, 12) + STATISTICS.format(20, 60, 30))
    store = TraceStore()
    (run,) = import_file(store, path)
    assert store.runs[run].told is not None
    told = store.runs[run].told
    assert [told.get(name) for name in SUMS[1:]] == [20, 60, 30]
    assert told["predicted_n"] is None


@pytest.mark.parametrize("kind", ["javascript", "python"])
def test_objects_as_other_languages_print_them(tmp_path: Path, kind: str) -> None:
    counts = {"predictedTokensCount": 40, "totalDraftTokensCount": 60, "stopReason": "it's"}
    counts |= {"acceptedDraftTokensCount": 25, "rejectedDraftTokensCount": 30}
    counts |= {"ignoredDraftTokensCount": 5}
    texts = {"python": repr(counts)}
    members = ",\n".join(f"  {key}: {value!r}" for key, value in counts.items())
    texts["javascript"] = "{\n" + members + ",\n  more: undefined,\n}"
    path = tmp_path / "reply.txt"
    path.write_text(texts[kind])
    store = TraceStore()
    (run,) = import_file(store, path)
    told = store.runs[run].told
    assert told is not None
    assert (told["predicted_n"], told["draft_n"], told["draft_n_accepted"]) == (40, 55, 25)


TENSORRT = """# TYPE trtllm_spec_decode_num_draft_tokens_total counter
trtllm_spec_decode_num_draft_tokens_total{engine_type="trtllm",model_name="m"} 900.0
trtllm_spec_decode_num_accepted_tokens_total{engine_type="trtllm",model_name="m"} 540.0
trtllm_spec_decode_acceptance_length{engine_type="trtllm",model_name="m"} 2.8
"""
LLAMA_BEFORE = """llamacpp:tokens_predicted_total 4000
llamacpp:draft_tokens_total 3600
llamacpp:draft_tokens_accepted_total 2700
llamacpp:draft_verify_steps_total 1200
"""
PYTHON = (
    "ChatCompletion(id='a', usage=Usage(n=3), timings={'predicted_n': 9, 'predicted_ms': 2.5, "
    "'prompt_n': 1, 'prompt_ms': 1.5, 'draft_n': 8, 'draft_n_accepted': 3})"
)
QUERIED = json.dumps(
    {
        "data": {
            "result": [
                {
                    "metric": {"engine": "0", "__name__": f"vllm:spec_decode_num_{name}_total"},
                    "value": [1787366173.1, str(n)],
                }
                for name, n in (("drafts", 100), ("draft_tokens", 300), ("accepted_tokens", 180))
            ]
        }
    }
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TENSORRT, (None, None, 900, 540)),
        (QUERIED, (None, 100, 300, 180)),
        ('{"mtp": {"attempts": 400, "accepted": 300, "rejected": 100}}', (None, None, 400, 300)),
        (PYTHON, (9, None, 8, 3)),
        ("timings:\n  predicted_n: 9\n  draft_n: 8\n  draft_n_accepted: 3\n", (9, None, 8, 3)),
        ('{"states": [{"avg_spec_accept_length": null}, {"avg_spec_accept_length": 2}]}',
         (None,) * 4),
        (LLAMA_BEFORE, (4000, 1200, 3600, 2700)),
        (LLAMA_BEFORE.replace("draft_tokens_accepted", "spec_tokens_accepted"), None),
        ("llamacpp:spec_tokens_drafted_total 9\nllamacpp:spec_tokens_accepted_total 6\n",
         (None, None, 9, 6)),
    ],
)  # fmt: skip
def test_counters_by_other_names(
    text: str, expected: tuple[Any, ...] | None, tmp_path: Path
) -> None:
    assert sums(imported(tmp_path, text)) == [expected or (4000, 1200, 3600, 2700)]


@pytest.mark.parametrize(
    "text",
    [
        "prompt,n_drafted,n_accepted\ncode,300,210\nstory,310,155\n",
        '{"prompt":"code","n_drafted":300,"n_accepted":210}\n{"n_drafted":310,"n_accepted":155}\n',
        '{"a":[{"accepted":210,"rejected":90},{"accepted":155,"rejected":155}]}',
        "- p: a\n  n_drafted: 300\n  n_accepted: 210\n- n_drafted: 310\n  n_accepted: 155\n",
        "|n|acceptance|\n|-|-|\n|2|70.0% (210/300)|\n|3|0.5 (155 accepted / 310 generated)|",
    ],
    ids=["CSV", "lines", "JSON", "YAML", "cells"],
)
def test_counts_are_known_by_their_names(tmp_path: Path, text: str) -> None:
    requests = imported(tmp_path, text).runs[0]["requests"]
    assert [
        [one["told"][name] for name in ("num_accepted_draft_tokens", "num_draft_tokens")]
        for one in requests
    ] == [[210, 300], [155, 310]]


@pytest.mark.parametrize(
    "text",
    [
        "t,spec_decode_num_draft_tokens,spec_decode_num_accepted_tokens\n1,300,180\n2,660,400\n",
        "".join(
            f'{{"a:spec_decode_num_draft_tokens":{n},"spec_decode_num_accepted_tokens":{accepted}}}\n'
            for n, accepted in ((300, 180), (660, 400))
        ),
    ],
    ids=["CSV", "lines"],
)
def test_a_servers_counters_are_not_added_up(tmp_path: Path, text: str) -> None:
    told = imported(tmp_path, text).runs[0]["told"]
    assert (told["num_draft_tokens"], told["num_accepted_draft_tokens"]) == (660, 400)


@pytest.mark.parametrize(
    "prefix", ["llama-1  | ", "Nov 01 10:00:0{} box llama[812]: ", "2026-11-01T10:00:0{}Z stdout> "]
)
def test_an_object_may_go_on_over_lines_with_prefixes(tmp_path: Path, prefix: str) -> None:
    lines = ["{", '  "timings": {', '    "predicted_n": 9, "predicted_ms": 2.5,']
    lines += ['    "draft_n": 8, "draft_n_accepted": 3', "  }", "}"]
    text = "".join(f"{prefix.format(i)}{line}\n" for i, line in enumerate(lines))
    told = imported(tmp_path, text).runs[0]["told"]
    assert (told["draft_n"], told["draft_n_accepted"], told["predicted_n"]) == (8, 3, 9)


TGI = """HTTP/1.1 200 OK
content-type: text/plain

# TYPE tgi_request_skipped_tokens histogram
tgi_request_skipped_tokens_bucket{le="0"} 60
tgi_request_skipped_tokens_bucket{le="1"} 80
tgi_request_skipped_tokens_bucket{le="2"} 100
tgi_request_skipped_tokens_bucket{le="+Inf"} 100
tgi_request_skipped_tokens_sum 60
tgi_request_skipped_tokens_count 100
tgi_request_generated_tokens_sum 160
tgi_request_generated_tokens_count 10
"""


def test_counters_of_tgi(tmp_path: Path) -> None:
    """100 steps, of which 10 are those of prompts; how many tokens were drafted is not counted."""
    told = read(TGI, tmp_path).runs[0]["requests"][0]["told"]
    assert told["num_accepted_draft_tokens"] == 60 and told["num_draft_tokens"] is None
    assert (told["predicted_n"], told["num_spec_steps"]) == (160, 90)
    assert told["num_accepted_tokens_per_pos"] == [40, 20]
    running = TGI.replace("tokens_sum 160", "tokens_sum 150")  # a request has not ended
    assert read(running, tmp_path).runs[0]["requests"][0]["told"]["num_spec_steps"] is None
    plain = "tgi_request_skipped_tokens_sum 0\ntgi_request_skipped_tokens_count 100\n"
    with pytest.raises(TraceFileError, match="but none of speculation"):
        read(plain, tmp_path)


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("      1: UINT32     |        1 | GGUF.version = 3\n", "GGUF file", "draftscope info"),
        ("llama_model_loader: - kv   0: general.architecture str = qwen35\n", "GGUF", "info"),
        ('{"data": [{"id": "a", "object": "model", "created": 1}]}', "models", "--model-name"),
        ('[{"id": 0, "n_ctx": 4096, "is_processing": false}]', "/slots", "/metrics"),
        ("seq_cp 0 1\n", "memory operations", "draftscope memory"),
        ("eval count:           298 token(s)\n", "ollama", "log"),
        ('{"generated_text": "abc", "details": {}}', "TGI", "/metrics"),
        ("Generation: 94 tokens, 139.4 tokens-per-sec\n", "mlx_lm", "oMLX"),
        ("[ Prompt: 25.1 t/s | Generation: 40.2 t/s ]\n", "llama-cli", "llama-server"),
        ("# TYPE vllm:num_requests_running gauge\n", "counters", "with speculation"),
    ],
)
def test_what_has_no_counts_is_named_with_what_to_bring(
    tmp_path: Path, text: str, what: str, remedy: str
) -> None:
    with pytest.raises(TraceFileError, match="which has no counts of drafted tokens") as caught:
        read(text, tmp_path)
    assert what in caught.value.message and remedy in caught.value.remedy


@pytest.mark.parametrize(
    "text",
    [
        '"timings": { ..., "predicted_n": 70, "draft_n": 60, "draft_n_accepted": 24 }',
        '{…, "timings": {"predicted_n": 70, ... , "draft_n": 60, "draft_n_accepted": 24, ...}}',
        """{ "content": "a, ... }",
          ...
          "timings": {
            ...
            "predicted_n": 70, "draft_n": 60, "draft_n_accepted": 24,
          }
        }""",
    ],
    ids=["first", "between", "lines"],
)
def test_members_that_a_person_has_left_out(tmp_path: Path, text: str) -> None:
    assert sums(imported(tmp_path, text)) == [(70, None, 60, 24)]


def test_a_list_with_figures_left_out_is_not_known(tmp_path: Path) -> None:
    text = """{"metrics": {"speculative_decoding": {"num_spec_steps": 20, "num_draft_tokens": 60,
      "mean_acceptance_length": 1.5, "num_accepted_draft_tokens": 10, ...,
      "acceptance_histogram": [12, 6, ...]}}}"""
    store = imported(tmp_path, text)
    assert sums(store) == [(None, 20, 60, 10)] and not rules(store)
    assert store.runs[0]["requests"][0]["told"]["acceptance_histogram"] is None
