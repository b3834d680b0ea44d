"""Logs as people paste them: wrapped by a terminal, with progress or a shell between the lines,
as collectors keep colours, with numbers made unreadable."""

from __future__ import annotations

import html
import json
import quopri
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.analysis.findings.check import recorded
from engine.observe.files import importing
from engine.observe.files.importing import import_file, rejoined
from engine.trace.store import TraceStore

LLAMA = """\
0.52.118.000 I slot print_timing: id  0 | task 17 | prompt eval time =    3159.54 ms /  1951 tokens (    1.62 ms per token,   617.49 tokens per second)
0.52.118.037 I slot print_timing: id  0 | task 17 |        eval time =   18357.91 ms /   539 tokens (   34.06 ms per token,    29.36 tokens per second)
0.52.118.111 I slot print_timing: id  0 | task 17 | draft acceptance = 0.46370 (  313 accepted /   675 generated), mean acceptance length =  2.39, acceptance rate per position = (0.658, 0.431, 0.302)
0.52.118.148 I statistics        draft-mtp: #calls(b,g,a) =    1    225    225, #gen drafts =    225, #acc drafts =   148, #gen tokens =    675, #acc tokens =   313, dur(b,g,a) = 0.003, 4170.532, 7.104 ms
0.52.118.185 I slot      release: id  0 | task 17 | stop processing: n_tokens = 2489, truncated = 0
"""  # noqa: E501
VLLM = "".join(
    f"(EngineCore_DP0 pid=311) INFO 10-12 19:04:{second} [metrics.py:101] SpecDecoding metrics: "
    "Mean acceptance length: 2.61, Accepted throughput: 48.30 tokens/s, Drafted throughput: 90.00 "
    "tokens/s, Accepted: 483 tokens, Drafted: 900 tokens, Per-position acceptance rate: 0.740, "
    "0.530, 0.340, Avg Draft acceptance rate: 53.7%\n"
    for second in (11, 21)
)
LM_STUDIO = """\
2026-10-12 21:04:11 [INFO]
 [LM STUDIO SERVER] Running chat completion on conversation with 2 messages.
2026-10-12 21:04:19 [INFO]
 [qwen] Generated prediction: {
  "id": "chatcmpl-1",
  "object": "chat.completion",
  "model": "qwen",
  "choices": [{"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}],
  "usage": {"prompt_tokens": 21, "completion_tokens": 180, "total_tokens": 201},
  "stats": {"total_draft_tokens_count": 120, "accepted_draft_tokens_count": 92,
    "rejected_draft_tokens_count": 28, "ignored_draft_tokens_count": 0}
}
"""


def hard(text: str, width: int) -> str:
    return "".join(
        line[at : at + width] + "\n"
        for line in text.splitlines()
        for at in range(0, len(line), width)
    )


def words(text: str, width: int) -> str:
    return "\n".join(textwrap.fill(line, width) for line in text.splitlines()) + "\n"


def journal(text: str, wrap: Callable[[str], Any], indent: int | None = None) -> str:
    entries = ({"_PID": "41", "MESSAGE": wrap(line)} for line in text.splitlines())
    return "".join(json.dumps(one, indent=indent) + "\n" for one in entries)


def coloured(line: str) -> list[int]:
    return list(f"\x1b[32m{line}\x1b[0m".encode())


BAR = "Processed prompts:  33%|###       | 1/3 [00:02<00:04,  2.1s/it]"
PIECES = {
    "wrapped at 80": hard(LLAMA, 80),
    "wrapped at 120": hard(LLAMA, 120),
    "wrapped between words": words(LLAMA, 80),
    "with CRLF": hard(LLAMA, 80).replace("\n", "\r\n"),
    "bytes of journalctl": journal(LLAMA, coloured),
    "objects of several lines": journal(LLAMA, str, 8),
    "progress": LLAMA.replace("0.52.118.111", "\rloading: 50%\rloading: 99%\r0.52.118.111"),
    "PowerShell": "llama-server.exe : " + LLAMA,
    "quoted and wrapped": textwrap.indent(words(LLAMA, 70), "> "),
    "quoted twice and wrapped": textwrap.indent(words(LLAMA, 70), ">> ", lambda _: True),
    "with marks of no width": LLAMA.replace("accepted", "accep\u200bted"),
    "vLLM": VLLM,
    "vLLM wrapped at 80": hard(VLLM, 80),
    "vLLM wrapped between words": words(VLLM, 80),
    "vLLM after progress": BAR + VLLM.replace("\n(", "\n" + BAR.replace("33", "66") + "("),
    "out of a table": "".join(f'web,"{one}"\n' for one in LLAMA.splitlines()),
    "vLLM out of CloudWatch": "timestamp,message\r\n"
    + "".join(f'17880000{n}1234,"{one}"\r\n' for n, one in enumerate(VLLM.splitlines())),
    "a decimal comma": LLAMA.replace("0.46370", "0,46370").replace("2.39", "2,39"),
}


def imported(data: bytes, tmp_path: Path) -> tuple[list[tuple[int, int]], list[str]]:
    path, store = tmp_path / "pasted.txt", TraceStore()
    path.write_bytes(data)
    runs = [store.runs[i]["told"] for i in import_file(store, path)]
    sums = [(one["num_accepted_draft_tokens"], one["num_draft_tokens"]) for one in runs]
    return sums, [one.rule for one in recorded(store)]


@pytest.mark.parametrize("kind", PIECES)
def test_a_pasted_log_is_one_run_with_its_sums(tmp_path: Path, kind: str) -> None:
    expected = [(966, 1800) if "vLLM" in kind else (313, 675)]
    sums, rules = imported(PIECES[kind].encode(), tmp_path)
    assert sums == expected
    assert "log-unread" not in rules


def test_a_transcript_without_a_mark_of_its_encoding(tmp_path: Path) -> None:
    assert imported(LLAMA.encode("utf-16-le"), tmp_path)[0] == [(313, 675)]


@pytest.mark.parametrize(("said", "speed"), [("29.36", 539 / 18.35791), ("29.31", 538 / 18.35791)])
def test_the_speed_is_what_the_log_says(tmp_path: Path, said: str, speed: float) -> None:
    """With the first token or without, by the build of the server."""
    path, store = tmp_path / "server.log", TraceStore()
    path.write_text(LLAMA.replace("29.36 tokens", f"{said} tokens"))
    (run,) = import_file(store, path)
    assert store.runs[run]["told"]["predicted_per_second"] == pytest.approx(speed)


@pytest.mark.parametrize(("said", "speed"), [(29.36, 539 / 18.35791), (29.31, 538 / 18.35791)])
def test_the_speed_is_what_the_reply_says(tmp_path: Path, said: float, speed: float) -> None:
    counts = {"predicted_n": 539, "predicted_ms": 18357.91, "predicted_per_second": said}
    path, store = tmp_path / "reply.json", TraceStore()
    path.write_text(json.dumps({"content": "a", "stop": True, "timings": counts}))
    (run,) = import_file(store, path)
    assert store.runs[run]["told"]["predicted_per_second"] == pytest.approx(speed)


def page(text: str) -> bytes:
    escaped = html.escape(text).replace("\n", "<br />\n").replace("  ", "&nbsp; ")
    return f"<div>Hello,</div><p>my log:</p><pre>{escaped}</pre>".encode()


PRINTED = "n_drafted = 120\nn_accept  = 92\naccept    = 76.667%\n"
MAIL = b"From: me\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n"


@pytest.mark.parametrize("text", [LLAMA, VLLM, LM_STUDIO, PRINTED])
def test_a_mail_and_a_page_are_the_text_that_they_hold(tmp_path: Path, text: str) -> None:
    """And what PowerShell saves."""
    plain = imported(text.encode(), tmp_path)
    mail = quopri.encodestring(text.encode())
    wide = text.replace("\n", "\r\n").encode("utf-16")
    for data in (mail, MAIL + mail.replace(b"\n", b"\r\n"), page(text), wide):
        assert imported(data, tmp_path) == plain


TABBY = (
    "2026-10-12 21:04:19.976 INFO:     Metrics (ID: ba98857171f843819f1002589743de29): 110 tokens "
    "generated in 7.51 seconds (Queue: 0.02 s, Process: 3840 cached tokens and 1192 new tokens at "
    "727.64 T/s, Generate: 28.2 T/s, Context: 5032 tokens, Draft: 64 / 90 tokens accepted)\n"
)
CURL = (
    "> POST /completion HTTP/1.1\n> Content-Length: 58\n>\n} [58 bytes data]\n< HTTP/1.1 200 OK\n"
    '< Server: llama.cpp\n<\n{ [560 bytes data]\n* Connection #0 left intact\n{"content":"a",'
    '"stop":true,"timings":{"predicted_n":90,"predicted_ms":900,"draft_n":90,"draft_n_accepted":64}}\n'
)


def test_grep_counts_the_lines_of_two_servers(tmp_path: Path) -> None:
    lines = [f"[{port}] {one}" for one in LLAMA.splitlines() for port in (8001, 8002)]
    text = "".join(f"{number}:{one}\n" for number, one in enumerate(lines, 1))
    assert imported(text.encode(), tmp_path)[0] == [(313, 675)] * 2


def test_a_line_of_a_request_that_was_wrapped(tmp_path: Path) -> None:
    for text in (TABBY, words(TABBY, 170), words(TABBY * 3, 110)):
        n = text.count("Draft:")
        assert imported(text.encode(), tmp_path) == ([(64 * n, 90 * n)], [])


def test_what_curl_says_of_its_transport_is_no_part_of_a_reply(tmp_path: Path) -> None:
    path, store = tmp_path / "reply.txt", TraceStore()
    path.write_text(CURL)
    import_file(store, path)
    told = store.runs[0]["told"]
    assert (told["draft_n_accepted"], told["draft_n"]) == (64, 90)
    assert not recorded(store)


def test_words_of_an_answer_are_left_as_they_are(tmp_path: Path) -> None:
    """Not of a page around it."""
    path, store = tmp_path / "reply.json", TraceStore()
    counts = {"predicted_n": 2, "predicted_ms": 9.5}
    path.write_text(json.dumps({"content": "a &gt; b=3D", "stop": True, "timings": counts}))
    import_file(store, path)
    assert store.runs[0]["requests"][0]["text"] == "a &gt; b=3D"


def test_the_log_of_a_desktop_program_has_its_replies(tmp_path: Path) -> None:
    assert imported(LM_STUDIO.encode(), tmp_path)[0] == [(92, 120)]


def test_hidden_numbers_are_no_drafter_that_is_mute(tmp_path: Path) -> None:
    sums, rules = imported(LLAMA.replace("  313 acc", "  xxx acc").encode(), tmp_path)
    assert sums == [(None, None)]
    assert "log-unread" in rules
    assert "never-drafts" not in rules


def test_a_sentence_about_acceptance_is_no_line_of_a_log(tmp_path: Path) -> None:
    said = "I see a draft acceptance rate of 0 on most runs, 0.9 on others.\n\n"
    assert "log-unread" not in imported((said + LLAMA).encode(), tmp_path)[1]


@pytest.mark.parametrize("text", [LLAMA, VLLM, LLAMA + VLLM, "x" * 80 + "\n" + LLAMA])
def test_a_log_that_is_not_wrapped_stays_as_it_is(text: str) -> None:
    assert rejoined(text) == text


def test_lines_keep_their_numbers() -> None:
    found = rejoined(hard(LLAMA, 80)).split("\n")
    wrapped = hard(LLAMA, 80).split("\n")
    assert [one for one in found if one] == LLAMA.splitlines()
    assert len(found) == len(wrapped)
    assert all(one.startswith(other) for one, other in zip(found, wrapped, strict=True) if one)


def test_a_task_with_other_sums_is_another_request(tmp_path: Path) -> None:
    line = "{}slot print_timing: id  0 | task 0 | draft acceptance = {} "
    line += "({:5} accepted /   100 generated)"
    for stamp in ("", "0.06.896.015 I "):
        text = "\n".join(line.format(stamp, f"0.{n}000", n) for n in (70, 50, 50))
        path = tmp_path / "two.log"
        path.write_text(f"before and after:\n{text}\n")
        store = TraceStore()
        (run,) = import_file(store, path)
        told = [one.told for one in store.runs[run].requests or ()]
        # a line that comes twice is the same one
        assert [one["draft_n_accepted"] for one in told] == [70, 50]


def test_a_long_log_with_colours_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as a whole, to see whether its lines are wrapped."""
    monkeypatch.setattr(importing, "rejoined", lambda text: pytest.fail("read as a whole"))
    path = tmp_path / "server.log"
    path.write_text(f"\x1b[32mI\x1b[0m main: starting\n{LLAMA}" + "srv  idle: nothing\n" * 70_000)
    assert import_file(TraceStore(), path)


def test_numbers_before_a_tab_count_lines(tmp_path: Path) -> None:
    line = "slot update_slots: id  3 | task 0 | accepted {}/4 draft tokens, new n_tokens = {}"
    path = tmp_path / "numbered.log"
    lines = [line.format(n % 5, 50 + 5 * n) for n in range(9)]
    path.write_text("".join(f"{100 + n:5d}\t{one}\n" for n, one in enumerate(lines)))
    store = TraceStore()
    (run,) = import_file(store, path)
    assert store.runs[run]["summary"]["draft_n"] == 36


def told(folder: Path, text: str) -> list[dict[str, Any]]:
    path = folder / "pasted.txt"
    path.write_text(text)
    store = TraceStore()
    (run,) = import_file(store, path)
    return [one.told for one in store.runs[run].requests or ()]


def test_lines_that_a_page_has_joined_are_apart_again(tmp_path: Path) -> None:
    plain = "".join(f"{line[15:]}\n" for line in LLAMA.splitlines())
    for text in (LLAMA, VLLM, plain):
        assert told(tmp_path, text.replace("\n", " ")) == told(tmp_path, text)
    twice = f"2026-10-02T10:11:12+0200 box app[1]: {LLAMA.splitlines()[2]}"
    assert rejoined(twice) == twice


def test_the_context_that_grep_shows_is_of_the_same_server(tmp_path: Path) -> None:
    lines = [
        f"a/server-1.log{':-'[n % 2]}{90 + n}{':-'[n % 2]}{line[15:]}"
        for n, line in enumerate(LLAMA.splitlines())
    ]
    assert told(tmp_path, "\n".join([*lines, "--"]))[0]["num_spec_steps"] == 225


def test_commas_for_points_are_read(tmp_path: Path) -> None:
    german = LLAMA.translate(str.maketrans(".", ",")).replace("0,52,118,", "0.52.118.")
    (found,) = told(tmp_path, german.split(", mean")[0] + "\n")
    assert (found["prompt_ms"], found["predicted_n"], found["draft_n"]) == (3159.54, 539, 675)


@pytest.mark.parametrize(
    ("rest", "n"),
    [
        ("On the older build I get 120 accepted of 300 drafted (40.0%).\n", 1),
        ("| build | drafted | accepted |\n|-|-|-|\n| a | 300 | 120 |\n| b | 90 | 60 |\n", 2),
        ("The rate of acceptance is what I expected of 2 cards.\n", 0),
        ("[atom 14:45:50] Accepted/Total Draft tokens: 64/93, Acceptance rate: 68.8%\n", 0),
    ],
)
def test_counts_that_a_person_has_written_next_to_a_log_are_not_lost_without_a_word(
    tmp_path: Path, rest: str, n: int
) -> None:
    path, store = tmp_path / "pasted.txt", TraceStore()
    path.write_text(f"{LLAMA}\n{rest}")
    (run,) = import_file(store, path)
    assert (store.runs[run].told or {})["draft_n"] == 675
    said = [one.message for one in store.runs[run].observed_findings or ()]
    assert said == [f"Counts beyond the log were not read: {n} lines or rows."] * (n > 0)
