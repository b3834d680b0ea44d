"""Findings on acceptance: planted causes are named, clean runs are not, in rounds and in sums."""

from __future__ import annotations

import json
from math import comb
from pathlib import Path

import numpy as np
import pytest

from engine.analysis.acceptance import shapes
from engine.analysis.acceptance.counts import binomial_at_most, fisher_less, wilson
from engine.analysis.findings.check import find, with_consequences
from engine.observe.files.importing import import_file
from engine.options import RunOptions, SpecOptions
from engine.session import Session
from engine.trace.facts import Finding
from engine.trace.store import TraceStore
from tests.support.acceptance_campaign import CLEAN, PLANTED, Records, clean, named, planted
from tests.support.round_rows import GREEDY, add_draft, add_round, found, new_run

CASES = Path(__file__).resolve().parents[4].parent / "shared/cases/09-no-finding-on-acceptance"
needs_cases = pytest.mark.skipif(not CASES.exists(), reason="needs ../shared")


# -- counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "n", "p"), [(0, 43, 0.15), (9, 30, 0.4), (5, 5, 0.1), (30, 300, 0.2)]
)
def test_binomial_tails(k: int, n: int, p: float) -> None:
    exact = sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
    assert binomial_at_most(k, n, p) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("table", [(0, 10, 5, 10), (3, 40, 30, 50), (9, 121, 100, 121)])
def test_fisher_exact(table: tuple[int, int, int, int]) -> None:
    k, n, other_k, other_n = table
    right, total = k + other_k, n + other_n
    ways = [
        comb(right, i) * comb(total - right, n - i) for i in range(max(0, right - other_n), k + 1)
    ]
    assert fisher_less(*table) == pytest.approx(sum(ways) / comb(total, n), rel=1e-9)


def test_counters_of_a_server_that_ran_for_months() -> None:
    assert binomial_at_most(10**8, 10**9, 0.100001) == pytest.approx(0.458, abs=1e-3)
    assert wilson(3, 10, -1.96) == pytest.approx(0.1078, abs=1e-4)
    assert wilson(0, 0, 1) == 1 and wilson(0, 0, -1) == 0


# -- campaign ----------------------------------------------------------------------------------


def test_planted_causes_are_named_and_clean_runs_are_not() -> None:
    """The whole: python -m tests.support.acceptance_campaign 400."""
    n = 3 * len(PLANTED)
    right = [(cause, rules) for cause, is_right, rules in planted(n, 11) if not is_right]
    assert len(right) <= n // 10, right
    accused = [(kind, rules) for kind, _, rules in clean(3 * len(CLEAN), 11) if rules]
    assert accused == []


@pytest.mark.parametrize("n", [10, 31])
def test_few_drafts_say_nothing(n: int) -> None:
    store = Records(np.random.default_rng(0), 3).play(n, lambda *_: 0.0)
    assert named(store) == []


def test_lookups_that_find_nothing_are_no_fault_unless_there_are_many() -> None:
    for n, rules in ((100, []), (300, [shapes.ZERO])):
        records = Records(np.random.default_rng(0), 8)
        records.play(n, lambda *_: 0.0)
        assert named(records.store("ngram-mod")) == rules


def test_drafters_of_a_chain_are_judged_apart() -> None:
    store, random = TraceStore(), np.random.default_rng(1)
    new_run(store)
    add_round(store, 0)
    for number in range(1, 201):
        if number % 2:
            add_draft(store, number, 1, int(random.random() < 0.8), drafter="draft-mtp")
        else:
            good = random.random() < 0.3
            add_draft(store, number, 8, 8 if good else 0, drafter="ngram-mod")
    assert named(store) == []
    for number in range(201, 301):
        add_draft(store, number, 2, 0, drafter="draft-simple")
    (finding,) = found(store, shapes.ZERO)
    assert "0 of 100 drafts of draft-simple" in finding.message
    assert "temperature 0" in finding.evidence


@pytest.mark.parametrize(("n_steady", "said"), [(8, 1), (1, 0)])
def test_a_fall_with_depth_is_one_of_most_sequences(n_steady: int, said: int) -> None:
    """Answers that turn from code to prose fall, too, but suddenly."""
    records = Records(np.random.default_rng(3), 3, 8)
    start = list(records.pos)

    def odds(seq: int, i: int, pos: int, _: np.ndarray) -> float:
        depth = (pos - start[seq]) / 500
        return max(0.04, 0.9 - depth) if seq < n_steady else 0.9 if depth < 0.5 else 0.4

    rules = named(records.play(400, odds))
    assert rules == [shapes.WITH_DEPTH] * said


def test_scripted_acceptance_says_nothing_of_a_drafter() -> None:
    for fact in ({"synthetic": True}, {"draft_accept": [0, 0]}):
        store = Records(np.random.default_rng(0), 3).play(200, lambda *_: 0.0)
        assert named(store) == [shapes.ZERO]
        store.runs[0].update(fact)
        assert named(store) == []


def test_everything_accepted_is_an_information() -> None:
    store = Records(np.random.default_rng(0), 4).play(120, lambda *_: 1.0)
    (finding,) = found(store, shapes.ALWAYS)
    assert (finding.severity, finding.message) == (
        "info",
        "All of 480 drafted tokens of draft-mtp were accepted.",
    )


def test_what_lowers_acceptance_is_its_cause() -> None:
    """A wrong row that the drafter's own check counted comes first, in whatever round."""
    store = TraceStore()
    new_run(store)
    add_round(store, 0)
    for number in range(1, 101):
        add_draft(store, number, 2, 0, drafter="draft-mtp")
    store.drafts.append(
        run_id=0, round=50, seq_id=0, drafter="draft-mtp", num_draft_tokens=2, num_wrong_rows=3
    )
    (cause, following), *others = with_consequences(find(store))
    assert (cause.rule, [one.rule for one in following]) == ("wrong-hidden-row", [shapes.ZERO])
    assert [one.rule for one, _ in others if one.severity != "info"] == []


# -- time --------------------------------------------------------------------------------------


def timed(
    store: TraceStore, n: int, drafted: int, accepted: int, ms: float, plain_ms: float
) -> None:
    random = np.random.default_rng(0)
    new_run(store)
    add_round(store, 0)
    for number in range(1, n + 1):
        noise = float(random.uniform(0.9, 1.1))
        if number % 3:
            add_draft(store, number, drafted, accepted, total_ms=ms * noise)
        else:
            add_round(store, number, total_ms=plain_ms * noise)


@pytest.mark.parametrize(
    ("ms", "accepted", "text"),
    [
        (47.0, 3, "an acceptance of 0.9"),  # 4 tokens in the time of 4.7
        (60.0, 3, "more than are drafted"),
        (30.0, 3, ""),
        (50.0, 1, ""),  # slower, as acceptance is low
    ],
)
def test_slower_although_acceptance_is_high(ms: float, accepted: int, text: str) -> None:
    store = TraceStore()
    timed(store, 120, 4 if ms < 60.0 else 3, accepted, ms, 10.0)
    hits = found(store, "slower-than-plain")
    assert len(hits) == bool(text)
    if text:
        assert text in hits[0].evidence and "times the tokens per second" in hits[0].message


def test_two_imported_sums_are_compared(tmp_path: Path) -> None:
    store = TraceStore()
    for name, timings in (
        ("plain.json", {"predicted_n": 400, "predicted_ms": 4000.0}),
        ("spec.json", {"predicted_n": 400, "predicted_ms": 5000.0, "draft_n": 374}),
    ):
        if "draft_n" in timings:
            timings["draft_n_accepted"] = 339
        whole = {"cache_n": 0, "prompt_n": 10, "prompt_ms": 5.0} | timings
        reply = {"content": "", "stop": True, "timings": whole}
        (tmp_path / name).write_text(json.dumps(reply))
        import_file(store, tmp_path / name)
    (finding,) = [one for one in find(store) if one.rule == "slower-than-plain"]
    assert finding.run_id == 1 and "0.80 times" in finding.message
    # 60 rounds took 5,000 ms; without drafts 399 tokens took 4,000 ms
    needed = 5000 / 60 / (4000 / 399) - 1
    assert f"break-even is at {needed:.2f} accepted tokens" in finding.evidence


@pytest.mark.parametrize(("slots", "said"), [((0, 0, 0), 1), ((0, 1, 2), 0), ((0, -1, 0), 0)])
def test_requests_of_one_slot_follow_one_another(
    tmp_path: Path, slots: tuple[int, ...], said: int
) -> None:
    """So their times add up; those of several slots may be at the same time."""
    store = TraceStore()
    for name, ms, drafts in (
        ("plain.jsonl", 4000.0, {}),
        ("spec.jsonl", 5000.0, {"draft_n": 374, "draft_n_accepted": 339}),
    ):
        timings = {"predicted_n": 400, "predicted_ms": ms, **drafts}
        replies = [
            {"content": "x", "stop": True, "id_slot": slot, "prompt": f"p{i}", "timings": timings}
            for i, slot in enumerate(slots)
        ]
        (tmp_path / name).write_text("\n".join(map(json.dumps, replies)))
        import_file(store, tmp_path / name)
    hits = [one for one in find(store) if one.rule == "slower-than-plain"]
    assert [one.run_id for one in hits] == [1] * said
    assert all("0.80 times" in one.message for one in hits)


# -- what people bring -------------------------------------------------------------------------


def test_shares_by_position_say_how_often_the_first_token_was_right(tmp_path: Path) -> None:
    """Of 171 drafts of 4 tokens 2 have all of them right: 1 in 85 at each index; the mean length
    leaves several numbers of drafts, so no counts are known."""
    at = "slot print_timing: id  0 | task 0 |"
    (tmp_path / "s.log").write_text(
        f"{at}        eval time =    5130.00 ms /   178 tokens (   28.82 ms per token, 34.7 tokens "
        f"per second)\n{at} draft acceptance = 0.01170 (    8 accepted /   684 generated), mean "
        "acceptance length =  1.05, acceptance rate per position = (0.012, 0.012, 0.012, 0.012)\n"
    )
    assert [one.rule for one in imported(tmp_path / "s.log")] == [shapes.ZERO]


def test_no_more_drafts_than_tokens_that_were_not_drafted(tmp_path: Path) -> None:
    """Drafts of 12 tokens: 16 of 112 begin well in the third row, as in hard text, not of 168, as
    they would if none were longer than 8."""
    rows = ("code", 298, 186), ("qa", 360, 248), ("prose", 128, 16), ("list", 680, 568)
    (tmp_path / "t.txt").write_text(
        "\n".join(
            f"  {name:<18} pred= {n} draft= 1344 acc= {k} rate={k / 1344:.3f} tok/s=38.1"
            for name, n, k in rows
        )
    )
    assert imported(tmp_path / "t.txt") == []


def imported(path: Path) -> list[Finding]:
    store = TraceStore()
    import_file(store, path)
    return [one for one in find(store) if one.rule.startswith("acceptance")]


@needs_cases
@pytest.mark.parametrize(
    ("file", "rule", "text"),
    [
        ("all-zero.prom", shapes.ZERO, "0 of 144 drafts"),
        ("first-position-only.prom", shapes.FIRST_ONLY, "49 of 144 times, the second 0 of 49"),
        ("slot-1-nothing.log", shapes.ONE_SLOT, "In sequence 1 10 of 120 drafts"),
    ],
)
def test_the_cases(file: str, rule: str, text: str) -> None:
    (finding,) = imported(CASES / file)
    assert finding.rule == rule and text in finding.message
    assert "Usual causes" in finding.suggestion


@needs_cases
def test_the_case_of_a_dead_head() -> None:
    opened = Session.open(CASES / "zero-head.gguf")
    spec = SpecOptions(types=("draft-mtp",))
    options = RunOptions(spec=spec, n_predict=50, ignore_eos=True)
    run = opened.start([opened.prompt("hello there")], options)
    while run.advance():
        pass
    (finding,) = found(run.trace, shapes.ZERO)
    assert "of draft-mtp had their first token accepted" in finding.message


def prom(
    engine: str, drafts: int, n_pos: int, accepted: list[int], drafted: int | None = None
) -> str:
    drafted = drafts * n_pos if drafted is None else drafted
    head = f"{engine}:spec_decode_num_"
    labels = '{engine="0",model_name="m"}'
    lines = [f"# TYPE {head}drafts_total counter", f"{head}drafts_total{labels} {drafts}.0"]
    lines += [f"{head}draft_tokens_total{labels} {drafted}.0"]
    lines += [f"{head}accepted_tokens_total{labels} {sum(accepted)}.0"]
    for i in range(n_pos):
        n = accepted[i] if i < len(accepted) else 0
        place = f'{{engine="0",model_name="m",position="{i}"}}'
        lines.append(f"{head}accepted_tokens_per_pos_total{place} {n}.0")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
@pytest.mark.parametrize(
    ("accepted", "drafts", "drafted", "rule"),
    [
        ([2, 0, 0], 700, None, shapes.ZERO),
        ([240, 0, 0, 0], 700, None, shapes.FIRST_ONLY),
        ([600, 520, 30, 4], 700, None, shapes.CLIFF),
        ([560, 430, 330, 250], 700, None, ""),  # decays as it does
        ([500, 120, 30, 8], 700, 1000, ""),  # p_min cuts drafts: few had a second token
        ([70, 10], 400, None, ""),  # weak
        ([3, 0], 20, None, ""),
    ],
)
def test_counters(
    tmp_path: Path, engine: str, accepted: list[int], drafts: int, drafted: int | None, rule: str
) -> None:
    path = tmp_path / "metrics.prom"
    path.write_text(prom(engine, drafts, len(accepted), accepted, drafted))
    assert [one.rule for one in imported(path)] == [rule] * bool(rule)


@pytest.mark.parametrize(
    ("steps", "rule"),
    [
        ([(3, 0)] * 60, shapes.ZERO),
        ([(3, 1)] * 40 + [(3, 0)] * 30, shapes.FIRST_ONLY),
        ([(3, 3), (3, 2), (3, 1)] * 30 + [(3, 0)] * 80, shapes.ZERO_FROM),
        ([(3, 3), (3, 2), (3, 1), (3, 0)] * 30, ""),
    ],
)
def test_lists_by_step(steps: list[tuple[int, int]], rule: str) -> None:
    store = TraceStore()
    new_run(store, options={"sampler": GREEDY})
    add_round(store, 0)
    for number, (drafted, accepted) in enumerate(steps, 1):
        add_draft(store, number, drafted, accepted)
    assert named(store) == [rule] * bool(rule)


def log(n_rounds: int, shares: list[float]) -> str:
    """The light log of a server with a slot for each share."""
    random, lines = np.random.default_rng(3), ["srv  llama_server: model loaded"]
    for slot in range(len(shares)):
        lines.append(f"slot launch_slot_: id  {slot} | task {slot} | processing task, is_child = 0")
    for _ in range(n_rounds):
        for slot, share in enumerate(shares):
            accepted = int((random.random(3) < share).cumprod().sum())
            head = f"slot   operator(): id  {slot} | task {slot} | "
            lines.append(f"{head}accepted  {accepted}/ 3 draft tokens")
    return "".join(
        f"0.{i // 1000:02d}.{i % 1000:03d}.000 I {line}\n" for i, line in enumerate(lines)
    )


@pytest.mark.parametrize(
    ("shares", "rules"),
    [
        ([0.8, 0.0, 0.7, 0.75], [shapes.ONE_SLOT]),
        ([0.02, 0.8], [shapes.ONE_SLOT]),
        ([0.9, 0.3, 0.6], []),  # easy and hard prompts
        ([0.0, 0.0], [shapes.ZERO]),
    ],
)
def test_slots_of_a_log(tmp_path: Path, shares: list[float], rules: list[str]) -> None:
    path = tmp_path / "server.log"
    path.write_text(log(80, shares))
    assert [one.rule for one in imported(path)] == rules


@pytest.mark.parametrize(("emitted", "n_hits"), [(400, 1), (10, 0), (None, 0)])
def test_counters_of_a_server_that_drafts_nothing(
    tmp_path: Path, emitted: int | None, n_hits: int
) -> None:
    text = prom("vllm", 0, 3, [])
    if emitted is not None:
        text += f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {emitted}.0\n'
    store = TraceStore()
    (tmp_path / "metrics.prom").write_text(text)
    import_file(store, tmp_path / "metrics.prom")
    assert [one.rule for one in find(store)] == ["never-drafts"] * n_hits


def sums(shares: list[float], prompts: list[int], *, in_one_slot: bool = True) -> TraceStore:
    """Requests of which only sums are known."""
    random, store, requests = np.random.default_rng(5), TraceStore(), []
    for i, (share, n_prompt) in enumerate(zip(shares, prompts, strict=True)):
        steps = np.minimum(random.geometric(1 - share, 60) - 1, 3)
        per_pos = [int((steps > index).sum()) for index in range(3)]
        told = {
            "num_spec_steps": 60,
            "num_draft_tokens": 180,
            "num_accepted_draft_tokens": sum(per_pos),
        }
        told |= {"num_accepted_tokens_per_pos": per_pos, "cache_n": 0, "prompt_n": n_prompt}
        requests.append({"seq_ids": [i], "told": told} | ({"slot": 0} if in_one_slot else {}))
    store.begin_run({"requests": requests})
    return store


def test_sums_of_requests_by_prompt_and_by_time() -> None:
    random = np.random.default_rng(6)
    prompts = random.integers(100, 60_000, 24).tolist()
    falling = [0.9 - 0.8 * n / 60_000 for n in prompts]
    (finding,) = find(sums(falling, prompts))
    assert finding.rule == shapes.WITH_DEPTH and "prompts of" in finding.evidence
    ends = [0.8 if n < 32_768 else 0.0 for n in prompts]
    (finding,) = find(sums(ends, prompts))
    least = min(n for n in prompts if n >= 32_768)
    assert finding.rule == shapes.ZERO_FROM and f"From {least:,} prompt tokens" in finding.message
    for in_one_slot in (True, False):
        (finding,) = find(sums([0.7] * 14 + [0.0] * 10, prompts, in_one_slot=in_one_slot))
        assert finding.rule == shapes.ZERO_FROM and "From request 15 on" in finding.message
    (finding,) = find(sums([0.7, 0.0, 0.8], prompts[:3], in_one_slot=False))
    assert (finding.rule, finding.seq_id) == (shapes.ONE_SLOT, 1)
    for seed in range(20):
        mixed = np.random.default_rng(seed).uniform(0.2, 0.95, 24).tolist()
        assert find(sums(mixed, prompts)) == []


def test_a_server_that_drafts_nothing() -> None:
    store = TraceStore()
    store.begin_run({"speculative_types": ["none", "draft-mtp"], "told": {"predicted_n": 300}})
    (finding,) = find(store)
    assert (finding.rule, "draft-mtp" in finding.message) == ("never-drafts", True)
    for facts in (
        {"speculative_types": ["none"], "told": {"predicted_n": 300}},
        {"speculative_types": ["draft-mtp"], "told": {"predicted_n": 20}},
        {"speculative_types": ["draft-mtp"], "told": {"predicted_n": 300, "draft_n": 12}},
    ):
        other = TraceStore()
        other.begin_run(facts)
        assert find(other) == []
