"""What a log tells of prompts: common, reused, processed again, and the checkpoint missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.analysis.findings.check import find
from engine.observe.files.importing import import_file
from engine.trace.facts import Finding
from engine.trace.prompt_reuse import PromptReuseRecord, ReuseSource, WhyProcessed
from engine.trace.store import TraceStore

CASE = Path(__file__).resolve().parents[4].parent / "shared/cases/10-prompt-reprocessing-in-a-log"
SLOT = "slot update_slots: id  {slot} | task {task} | "
FORCED = (
    "forcing full prompt re-processing due to lack of cache data (likely due to SWA or "
    "hybrid/recurrent memory)"
)


class Log:
    """A log written entry by entry, as a server does it."""

    def __init__(self) -> None:
        self.lines = ["srv  llama_server: model loaded"]
        self._task = 0

    def request(
        self,
        n_prompt: int,
        processed: int,
        *said: str,
        slot: int = 0,
        chosen: str = "",
        written: int = 4,
        is_verbose: bool = True,
        server: str = "",
    ) -> Log:
        """One request with a round; said: what the server says of its prompt."""
        head = SLOT.format(slot=slot, task=self._task)
        self._task += 1
        if chosen:
            self.lines.append(f"slot get_availabl: id  {slot} | task -1 | {chosen}")
        if server:
            self.lines.append(f"srv          load:  - {server}")
        self.lines.append(f"{head}processing task, is_child = 0")
        if is_verbose:
            self.lines.append(
                f"{head}new prompt, n_ctx_slot = 65536, n_keep = 0, task.n_tokens = {n_prompt}"
            )
        self.lines += [f"{head}{one}" for one in said]
        if is_verbose:
            cached = n_prompt - processed
            self.lines.append(f"{head}cached n_tokens = {cached}, memory_seq_rm [{cached}, end)")
        self.lines += [
            f"{head}accepted  2/ 3 draft tokens",
            f"{head}prompt eval time =    8800.00 ms / {processed} tokens (    0.59 ms per token)",
            f"{head}       eval time =     100.00 ms /     {written} tokens (   25.00 ms)",
            f"{head}draft acceptance = 0.66667 (    2 accepted /     3 generated)",
            f"{head}stop processing: n_tokens = {n_prompt + written - 1}, truncated = 0",
        ]
        return self

    def read(self, folder: Path) -> tuple[list[PromptReuseRecord], list[Finding]]:
        path = folder / "server.log"
        times = (f"1.{i // 60:02d}.{i % 60:03d}.000 I " for i in range(len(self.lines)))
        path.write_text("".join(f"{t}{line}\n" for t, line in zip(times, self.lines, strict=True)))
        store = TraceStore()
        (run_id,) = import_file(store, path)
        found = [one for one in find(store) if one.rule == "prompt-processed-again"]
        return store.runs[run_id].prompt_reuse or [], found


def common(n_past: int, n_held: int, n_swa: int = 0) -> str:
    return (
        f"n_past = {n_past}, slot.prompt.tokens.size() = {n_held}, seq_id = 0, "
        f"pos_min = {n_held - 1}, n_swa = {n_swa}"
    )


def checkpoint(what: str, n: int) -> str:
    return f"{what} (pos_min = {n - 1}, pos_max = {n - 1}, n_tokens = {n}, size = 149.626 MiB)"


@pytest.mark.skipif(not CASE.exists(), reason="needs ../shared")
def test_the_case() -> None:
    store = TraceStore()
    (run_id,) = import_file(store, CASE / "reprocess.log")
    first, second = store.runs[run_id].prompt_reuse or []
    assert (first.n_prompt, first.n_reused, first.n_again) == (15_000, 0, 0)
    assert (second.n_held, second.n_common, second.n_prompt) == (15_003, 14_980, 15_040)
    assert (second.n_reused, second.n_again, second.erased) == (0, 14_980, [14_991])
    assert second.parts[0].why is WhyProcessed.NO_CHECKPOINT
    (finding,) = [one for one in find(store) if one.rule == "prompt-processed-again"]
    assert finding.seq_id == 1
    for text in ("14,980 of its 15,040", "0 were reused", "8,823 ms", "at position 14,990"):
        assert text in finding.message


def test_a_continued_prompt_is_no_trouble(tmp_path: Path) -> None:
    log = Log().request(1000, 1000).request(1100, 97)
    (_, second), found = log.read(tmp_path)
    assert (second.n_reused, second.n_again, found) == (1003, 0, [])


def test_the_nearest_checkpoint_lies_before(tmp_path: Path) -> None:
    log = Log().request(12_800, 12_800, checkpoint("created context checkpoint 1 of 32", 3830))
    restored = "restored context checkpoint (pos_min = 3829, pos_max = 3829, n_tokens = 3830, "
    log.request(12_900, 9070, common(12_800, 12_803), restored + "n_past = 3830, size = 1.0 MiB)")
    (first, second), (finding,) = log.read(tmp_path)
    assert [one.n_tokens for one in first.created] == [3830]
    assert (second.source, second.checkpoint) == (ReuseSource.CHECKPOINT, 3830)
    assert (second.n_again, second.parts[0].why) == (8970, WhyProcessed.BEHIND_CHECKPOINT)
    assert "8,970 of them again" in finding.message
    assert "nearest context checkpoint is that of 3,830 tokens" in finding.message


def test_a_checkpoint_made_room(tmp_path: Path) -> None:
    log = Log().request(9000, 9000, checkpoint("created context checkpoint 1 of 1", 4000))
    evicts = checkpoint("erasing old context checkpoint", 4000)
    log.request(9500, 497, evicts, checkpoint("created context checkpoint 1 of 1", 9400))
    log.request(9200, 9200, common(8000, 9503), FORCED)
    (*_, third), (finding,) = log.read(tmp_path)
    assert third.parts[0].why is WhyProcessed.EVICTED
    assert "checkpoint of 4,000 tokens was evicted" in finding.message


def test_a_usable_checkpoint_is_erased(tmp_path: Path) -> None:
    log = Log().request(9000, 9000)
    erased = checkpoint("erased invalidated context checkpoint", 7000)
    log.request(9200, 9200, common(8000, 9003), FORCED, erased)
    (_, second), (finding,) = log.read(tmp_path)
    assert (second.parts[0].why, second.usable) == (WhyProcessed.ERASED, [7000])
    assert "a usable context checkpoint of 7,000 tokens was erased" in finding.message


def test_a_sliding_window_is_named(tmp_path: Path) -> None:
    log = Log().request(9000, 9000).request(9200, 9200, common(8990, 9003, 4096), FORCED)
    _, (finding,) = log.read(tmp_path)
    assert "attention with a sliding window of 4,096" in finding.message


def test_a_template_that_strips_thinking_parts_within_the_answer(tmp_path: Path) -> None:
    log = Log().request(5000, 5000, written=800)
    log.request(5100, 5100, common(5002, 5799), FORCED)
    _, (finding,) = log.read(tmp_path)
    assert "the texts diverge 2 tokens into the previous request's answer" in finding.evidence
    other = Log().request(5000, 5000).request(5100, 5100, common(40, 5003), FORCED)
    records, (finding,) = other.read(tmp_path)
    assert "diverge at token 40 of the previous request" in finding.evidence
    assert records[1].n_again == 40


def test_a_slot_chosen_as_least_recently_used_held_another_text(tmp_path: Path) -> None:
    log = (
        Log()
        .request(5000, 5000)
        .request(3000, 3000, common(2, 5003), chosen="selected slot by LRU, t_last = 81")
    )
    (_, second), found = log.read(tmp_path)
    assert (second.n_common, second.n_again, found) == (2, 2, [])


def test_slots_are_apart(tmp_path: Path) -> None:
    log = Log().request(5000, 5000).request(7000, 7000, slot=1)
    log.request(7100, 7100, common(6990, 7003), FORCED, slot=1).request(5100, 97)
    records, (finding,) = log.read(tmp_path)
    assert [(one.slot, one.n_again) for one in records] == [(0, 0), (1, 0), (1, 6990), (0, 0)]
    assert finding.seq_id == 2


def test_similarity_alone_gives_bounds(tmp_path: Path) -> None:
    chosen = "selected slot by LCP similarity, sim_best = 0.996 (> 0.100 thold), f_keep = 0.998"
    log = Log().request(15_000, 15_000, is_verbose=False)
    log.request(15_040, 15_040, chosen=chosen, is_verbose=False)
    records, (finding,) = log.read(tmp_path)
    assert [one.n_prompt for one in records] == [15_000]  # of the second no number is exact
    assert "at least 14,972 of its 15,040" in finding.message
    assert "does not show why" in finding.message


def test_a_prompt_from_the_cache_of_prompts_is_not_what_the_slot_held(tmp_path: Path) -> None:
    chosen = "selected slot by LCP similarity, sim_best = 0.300 (> 0.100 thold), f_keep = 0.300"
    log = Log().request(5000, 5000)
    log.request(
        5100, 97, chosen=chosen, server="found better prompt with f_keep = 1.000, sim = 0.98"
    )
    (first,), found = log.read(tmp_path)
    assert (first.seq_id, found) == (0, [])


def test_of_many_the_largest_are_shown(tmp_path: Path) -> None:
    log, n = Log(), 1000
    for i in range(20):
        log.request(n + 100 * i, n + 100 * i, *([common(900, n + 3), FORCED] if i else []))
    records, found = log.read(tmp_path)
    assert len(records) == 20 and len(found) == 9
    assert "19 of 20 requests processed text again" in found[0].message
    assert "17,100 tokens in total" in found[0].message


def test_numbers_that_cannot_be_are_counted(tmp_path: Path) -> None:
    log = Log().request(5000, 5000).request(5100, 5100, common(10**12, 10**13), FORCED)
    records, found = log.read(tmp_path)
    assert (len(records), found) == (1, [])


NEWEST = "selected slot by LCP similarity, f_sim_best = 0.994 (1836/1848) > 0.100 thold"


def test_newest_builds_say_what_is_common_by_counts_and_by_comparing(tmp_path: Path) -> None:
    created = (checkpoint("created context checkpoint 1 of 32", n) for n in (825, 1844))
    restored = checkpoint("restored context checkpoint", 825)
    compared = [f"checking checkpoint with [{n}, {n}] against 1836..." for n in (1843, 824)]
    for chosen in (NEWEST, ""):
        log = Log().request(1846, 1846, *created, written=30)
        log.request(1848, 1023, *compared, restored, chosen=chosen)
        (_, second), (finding,) = log.read(tmp_path)
        assert (second.n_common, second.n_reused, second.checkpoint) == (1836, 825, 825)
        assert second.n_again == 1011 and "1,011 of them again" in finding.message


def test_a_part_of_a_log_has_what_its_lines_compare(tmp_path: Path) -> None:
    erased = (
        "erased invalidated context checkpoint (pos_min = {}, pos_max = 8683, n_tokens = 8684, "
        "n_swa = {}, pos_next = 0, size = 149.063 MiB)"
    )
    for first, n_swa, n_common in ((8683, 0, "6,859"), (7148, 512, "7,371")):
        compared = f"checking checkpoint with [{first}, 8683] against 6859..."
        log = Log().request(13_648, 13_648, compared, FORCED, erased.format(first, n_swa))
        log.lines.pop(0)
        records, (finding,) = log.read(tmp_path)
        assert f"{n_common} of its 13,648 tokens" in finding.message
        assert "nearest, of 8,684 tokens, at position 8,683, lies after it" in finding.message
        assert "slot held" not in finding.evidence and records == []


def test_ik_llama_cpp_says_what_is_common_before_the_slot(tmp_path: Path) -> None:
    def said(what: str, task: int, more: str) -> str:
        return f'INFO [ f] {what} | tid="1" timestamp=1 id_slot=0 id_task={task}{more}'

    def request(task: int, held: int, common: int, reused: int, n: int, *more: str) -> list[str]:
        return [
            said("slot is processing task", task, ""),
            f"======== Cache: cache_size = {held}, n_past =  {common}, n_past_prompt = {common}",
            *(f"slot apply_checkp: id  0 | task {task} | {one}" for one in more),
            said("kv cache rm [p0, end)", task, f" p0={reused}"),
            f"slot print_timing: id  0 | task {task} | ",
            f"prompt eval time =    1400.00 ms /  {n - reused} tokens (    0.74 ms per token)",
            "       eval time =    1200.00 ms /    30 tokens (   40.00 ms per token)",
            said(
                "slot released", task, f" n_past={n + 29} n_cache_tokens={n + 29} truncated=false"
            ),
        ]

    restored = "restored context checkpoint took  11.87 ms (pos_min = 999, pos_max = 999)"
    lines = [*request(1, 0, 0, 0, 18_000), *request(2, 18_029, 17_990, 1000, 18_100, restored)]
    path = tmp_path / "ik.log"
    path.write_text("\n".join(lines) + "\n")
    store = TraceStore()
    (run_id,) = import_file(store, path)
    _, second = store.runs[run_id].prompt_reuse or []
    assert (second.n_prompt, second.n_held, second.n_common) == (18_100, 18_029, 17_990)
    assert (second.n_reused, second.n_again, second.checkpoint) == (1000, 16_990, 1000)
    (finding,) = [one for one in find(store) if one.rule == "prompt-processed-again"]
    assert "17,100 were processed in 1,400 ms" in finding.message
