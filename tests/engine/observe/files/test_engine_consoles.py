"""What the consoles of other engines say of their drafts, and the lengths and depths in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.analysis.findings.check import find, record_findings
from engine.observe.files.importing import import_file, recognise
from engine.observe.files.log_run import fill_log
from engine.trace.store import TraceStore
from tests.engine.observe.files.pasted_log import COUNTS, ROWS, read, rules, told
from tests.support.golden_files import DATA


def test_omlx_tells_what_each_index_of_its_drafts_had() -> None:
    line = (
        "2026-08-16 12:35:26,812 - mlx_lm_mtp - INFO - MTP[{0}] finish=length tokens=128 cycles=47 "
        "tok/cycle=2.72 accept={1}/94 (87.2%) depth[d1=43/47,d2=39/47] d0=0 emits[init=1]\n"
    )
    text = "".join(line.format(i, 82) for i in range(200)) + line.format("x", 81)
    store = TraceStore()
    (run,) = fill_log(store, text, "omlx.log")
    requests = store.runs[run].requests or []
    assert len(requests) == 201 and requests[200].told == {}  # which contradicts itself
    names = "predicted_n", "draft_n", "draft_n_accepted", "num_spec_steps"
    assert {tuple(map(one.told.get, names)) for one in requests[:200]} == {(128, 94, 82, 47)}
    assert requests[0].told["num_accepted_tokens_per_pos"] == [43, 39]


def test_the_console_of_koboldcpp() -> None:
    """Drafts with their tokens one by one, then the request and what became of them."""
    end = "[21:38:44] CtxLimit:712/32768, Amt:{}/1536, Init:0.01s, Process:1.20s ({}426.67T/s), "
    end += "Generate:9.84s ({}20.33T/s), Total:11.05s{}"
    debug = "2.3ms/T = ", "49.2ms/T = ", " (1.81T/s)"
    draft = "Drafted 4 Tokens: [' of (315)', ' the (279)', ' a (264)', ' an (458)', ]"
    judged = [f"(Draft {i}/4): Predicted=9 (a), Actual=9 (a) [PASS]" for i in range(1, 5)]
    lines = [draft, *judged, draft, judged[0], judged[1].replace("PASS", "FAIL"), draft, judged[0]]
    text = "\n".join([
        "Welcome to KoboldCpp - Version 1.111.2", "Processing Prompt [BLAS] (512 / 512 tokens)",
        *lines, "", end.format(7, *debug), "(Draft Results - Success:6, Failure:1)Output: hi",
        end.format(200, "", "", ""), draft, end.format(5, *debug),
        "(Draft Results - Success:90, Failure:9)", "CtxLimit: 3768/4096, Process:0.44s (2T/s)", "",
    ])  # fmt: skip
    store = read(text)
    assert store.runs[0]["source"]["engine"] == "koboldcpp"
    names = ("predicted_n", "draft_n", "draft_n_accepted", "num_spec_steps", "predicted_ms")
    names += ("num_accepted_draft_tokens",)
    assert told(store, *names) == [
        (7, 12, 6, 3, 9840, 6), (200, None, None, None, 9840, None),
        (5, None, None, None, 9840, 90),  # most of its drafts are missing
    ]  # fmt: skip
    assert rules(store) == ["log-unread"] and recognise(text.encode()) == "log"


def test_sglang_may_number_its_batches() -> None:
    line = (
        "[2026-09-12 10:00:0{0} DP{0} TP0] Decode batch [{1}], #running-req: 3, accept len: 2.50, "
    )
    store = read("".join(f"{line.format(i, 10 * i)}accept rate: 0.50\n" for i in (0, 1)))
    assert told(store, "mean_acceptance_length", "draft_acceptance_rate") == [(2.5, 0.5)] * 2


def test_the_console_of_koboldcpp_in_another_order() -> None:
    """What became of the drafts comes before the line of their request, and fits it."""
    draft, end = "Drafted 8 Tokens: [ 1 2 ]", "CtxLimit:98/8192, Amt:{}/200, Process:0.25s (3T/s), "
    end += "Generate:0.52s (34T/s), Total:0.77s"
    results = "(Draft Results - Success:{}, Failure:{})"
    text = "\n".join([
        *[draft] * 3, results.format(15, 3), end.format(18), end.format(40), *[draft] * 2,
        results.format(9, 2), end.format(11), draft, results.format(5, 1), end.format(90), "",
    ])  # fmt: skip
    store = read(text)
    names = "predicted_n", "draft_n", "draft_n_accepted", "num_spec_steps"
    assert told(store, *names) == [
        (18, 24, 15, 3), (40, None, None, None), (11, 16, 9, 2), (90, None, None, None),
    ]  # fmt: skip
    assert rules(store) == ["log-unread"]  # 5 accepted tokens and one more are no 90


def test_intervals_of_atom_and_requests_of_omlx() -> None:
    line = "{}:[atom 14:45:5{}] [MTP Stats{}] Average toks/fwd: 1.90, Accepted/Total Draft tokens: "
    line += "{}/{}, Acceptance rate: 45.00%, Accepted tokens distribution: {{0: '40.00%', "
    line += "1: '30.00%', 2: '30.00%'}}\n"
    total = line.format(8, 0, " " * 9, 9000, 20000)
    store = read(line.format(7, 0, " Interval", 900, 2000) + total)
    assert told(store, "draft_n", "draft_n_accepted", "num_spec_steps") == [(2000, 900, 1000)]
    (one,) = store.runs[0]["requests"]
    assert one["told"]["num_accepted_tokens_per_pos"] == [600, 300] and one["place"] == "14:45:50"
    head = "2026-08-16 21:10:01,512 - omlx.scheduler - INFO - [-] - vlm_mtp stats: request=a"
    rest = " finish=stop rounds=40 accepted=52/80 (65.0%) tokens_per_round=2.30{}\n"
    store = read(head + rest.format(" emitted=93 block_size=3") + head + rest.format(""))
    names = "predicted_n", "draft_n", "draft_n_accepted", "num_spec_steps"
    assert told(store, *names) == [(93, 80, 52, 40), (None, 80, 52, 40)]


def test_shares_by_position_tell_the_steps_that_a_mean_length_leaves_open() -> None:
    """152 accepted in 153 or in 154 drafts make 1.99; only 153 have these shares."""
    sums = "slot print_timing: id  0 | task 1 | draft acceptance = 0.49672 (  152 accepted /   306 "
    sums += "generated), mean acceptance length =  1.99, acceptance rate per position = ({})\n"
    store = read(sums.format("0.601, 0.392"))
    assert told(store, "num_spec_steps", "draft_n") == [(153, 306)]
    assert told(read(sums.format("0.6, 0.4")), "num_spec_steps") == [(None,)]


def test_the_lines_of_lmdeploy_and_tabbyapi() -> None:
    head = (
        "[2026-11-02 10:00:0{0} DP{0}] Avg thr (in/out): 100.0 / 250.0 tokens/s, KV cache: 10.0%, "
    )
    said = "SpecDecoding metrics: Draft acceptance rate: 61.67%, Mean acceptance length: 2.85, "
    said += "Accepted: 555 tokens, Drafted: 900 tokens, Per-position acceptance rate: "
    store = read("".join(head.format(i) + said + "0.800, 0.600, 0.450\n" for i in (0, 1)))
    assert store.runs[0]["source"]["engine"] == "lmdeploy"
    assert told(store, "num_spec_steps", "draft_n_accepted", "draft_n") == [(300, 555, 900)] * 2
    assert [one["place"][:8] for one in store.runs[0]["requests"]] == ["engine 0", "engine 1"]
    line = "INFO: Metrics (ID: {}): 120 tokens generated in 2.2 seconds (Queue: 0.0 s, Process: 64 "
    line += "cached tokens and 36 new tokens at 500.0 T/s, Generate: 60.0 T/s, Context: 100 tokens"
    drafts = ", Draft: 80 / 120 tokens accepted (66.67%)"
    store = read(f"{line.format('8c1d')}{drafts}) \n{line.format('8c1e')}) \n")
    assert told(store, "cache_n", *COUNTS) == [
        (64, 36, 120, 120, 80, None),
        (64, 36, 120, *[None] * 3),
    ]
    assert store.runs[0]["source"]["engine"] == "tabbyapi" and not rules(store)


def test_letters_and_rows_keep_their_names() -> None:
    """A letter among the digits of a pod's name is kept; a prompt's name has no prefix."""
    lines = (DATA / "logs" / "default.log").read_text().splitlines()
    store = read("".join(f"[pod/llama-6d5f-x2/server] {line}\n" for line in lines))
    assert store.runs[0]["server"]["address"] == "pod/llama-6d5f-x2/server"
    row = "nov 02 box bench[9]:   code_python        pred= 192 draft= 153 acc= 140 rate=0.915"
    store = read(f"{row}\n")
    assert [one["place"] for one in store.runs[0]["requests"]] == ["code_python"]


def test_a_mean_length_that_has_several_numbers_of_steps_is_told() -> None:
    head = "0.02.100.120 I slot print_timing: id  0 | task 0 | "
    counts = "draft acceptance = 0.43103 (  400 accepted /   928 generated), "
    store = read(f"{head}{counts}mean acceptance length =  2.00\n")
    assert told(store, "num_spec_steps", "mean_acceptance_length") == [(None, 2.0)]


@pytest.mark.parametrize("damaged", ["foo pred=; acc=;", "foo xpred= 3 draft= 4 acc= 2 rate=0.5"])
def test_a_damaged_row_of_a_table_is_told(damaged: str) -> None:
    rows = [ROWS.format(name=name, p=192, d=150, a=138, r="0.920", s=7.0) for name in ("a", "b")]
    store = read(f"{''.join(rows)}{damaged}\n")
    assert rules(store) == ["log-unread"]
    assert told(store, "predicted_n") == [(192,), (192,)]


OMLX = (
    "MTP[1] finish=length tokens=131 cycles=60 tok/cycle=2.26 accept=71/103 (68.9%) "
    "depth[d1=45/58,d2=19/35,d3=7/10] d0=2 emits[init=2]\n"
)
FORK = (
    "INFO MTP[a] finish=stop cycles=60 accepted=75/120 (62.5%) cycles_by_depth[d2=60]\n"
    "INFO MTP[a] accept_by_depth[d1=46/60,d2=29/60,d3=0/0] forwards[mtp=122]\n"
)


@pytest.mark.parametrize(
    ("text", "counts", "conditional"),
    [(OMLX, (58, 103, 71), [45 / 58, 19 / 35, 7 / 10]), (FORK, (60, 120, 75), [46 / 60, 29 / 46])],
)
def test_depths_of_mlx_servers(
    text: str, counts: tuple[int, ...], conditional: list[float], tmp_path: Path
) -> None:
    path = tmp_path / "server.log"
    path.write_text(text)
    store = TraceStore()
    import_file(store, path)
    (one,) = store.runs[0]["requests"]
    names = "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"
    assert tuple(map(one["told"].get, names)) == counts
    assert one["told"]["acceptance_per_position"]["conditional"] == pytest.approx(conditional)
    assert not find(store)


def _batches(means: list[float]) -> str:
    line = (
        "[2026-10-01 12:{}:{:02d} TP0] Decode batch, #running-req: 1, accept len: {:.2f}, "
        "accept rate: {:.2f}, gen throughput (token/s): {:.2f}, #queue-req: 0\n"
    )
    rows = [(10 + i // 60, i % 60, one) for i, one in enumerate(means)]
    return "".join(line.format(m, s, one, (one - 1) / 3, 50 * one) for m, s, one in rows)


@pytest.mark.parametrize(
    ("means", "rule", "words"),
    [
        ([1.01, 1.02] * 20, "acceptance-zero", "0.02 tokens of each of about 1,950 drafts"),
        ([2.5] * 20 + [1.0] * 20, "acceptance-zero-from", "before it 1.50 tokens of each"),
        ([1.35] * 40, "", ""),
        ([1.01] * 3, "", ""),
    ],
)
def test_averages_at_chance(means: list[float], rule: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "sglang.log"
    path.write_text(_batches(means))
    store = TraceStore()
    record_findings(store, import_file(store, path))
    found = find(store)
    assert [one.rule for one in found] == ([rule] if rule else [])
    assert all(words in one.message for one in found)


def test_averages_without_times_are_not_judged(tmp_path: Path) -> None:
    path = tmp_path / "sglang.log"
    path.write_text(re.sub(r"\[.*?\] ", "", _batches([1.01] * 40)))
    store = TraceStore()
    import_file(store, path)
    assert not find(store)


@pytest.mark.parametrize("depths", ["d1=400/500,d2=0/300", "d1=450/500,d2=400/450,d3=8/300"])
def test_depths_that_were_judged_are_those_that_count(depths: str, tmp_path: Path) -> None:
    pairs = [tuple(map(int, one.split("=")[1].split("/"))) for one in depths.split(",")]
    accepted, drafted = map(sum, zip(*pairs, strict=True))
    path = tmp_path / "server.log"
    line = f"MTP[1] finish=stop tokens=9999 cycles=500 accept={accepted}/{drafted} depth[{depths}]"
    path.write_text(line + "\n")
    store = TraceStore()
    import_file(store, path)
    (found,) = find(store)
    assert f"{pairs[-2][0]} of {pairs[-2][1]}" in found.message
    assert f"{pairs[-1][0]} of {pairs[-1][1]}" in found.message


COMPARED = pytest.mark.parametrize(
    ("speed", "rate", "n", "running", "is_slower"),
    [
        (80, 0.6, 10, 1, True),
        (95, 0.6, 10, 1, False),  # within what batches differ by
        (80, 0.3, 10, 1, False),  # too few are accepted to expect more
        (80, 0.6, 7, 1, False),
        (80, 0.6, 10, 4, False),  # more requests at once
    ],
)


@COMPARED
def test_intervals_of_vllm_with_drafts_are_compared_with_those_without(
    tmp_path: Path, speed: float, rate: float, n: int, running: int, is_slower: bool
) -> None:
    line = "INFO 10-01 12:{:02d}:{:02d} [loggers.py:257] Engine 000: Avg prompt throughput: 0.0 "
    line += "tokens/s, Avg generation throughput: {:.1f} tokens/s, Running: {} reqs, Waiting: 0\n"
    sums = f"INFO 10-01 12:02:00 [metrics.py:101] SpecDecoding metrics: Accepted: {rate * 300:.0f} "
    sums += "tokens, Drafted: 300 tokens\n"
    plain = "".join(line.format(1, i, 100 + i % 3, 1) for i in range(10))
    drafted = "".join(line.format(2, i, speed + i % 3, running) + sums for i in range(n))
    (tmp_path / "log").write_text(plain + drafted)
    store = TraceStore()
    import_file(store, tmp_path / "log")
    assert len(store.runs[0].requests or []) == n
    assert [one.rule for one in find(store)] == ["slower-than-plain"] * is_slower


@COMPARED
def test_batches_of_sglang_with_drafts_are_compared_with_those_without(
    tmp_path: Path, speed: float, rate: float, n: int, running: int, is_slower: bool
) -> None:
    line = "[2026-10-01 12:{:02d}:{:02d} TP0] Decode batch, #running-req: {}, {}cuda graph: True, "
    line += "gen throughput (token/s): {:.2f}, #queue-req: 0\n"
    accept = f"accept len: 2.80, accept rate: {rate:.2f}, "
    plain = "".join(line.format(1, i, 1, "", 100 + i % 3) for i in range(10))
    drafted = "".join(line.format(2, i, running, accept, speed + i % 3) for i in range(n))
    (tmp_path / "log").write_text(plain + drafted)
    store = TraceStore()
    import_file(store, tmp_path / "log")
    assert len(store.runs[0].requests or []) == n
    assert [one.rule for one in find(store)] == ["slower-than-plain"] * is_slower
