"""Processor seconds and memory of importing long logs, and records, streams and replies that were
kept: `python -m tests.bench.logs [KIND ...]`. The latter may have 64 MB: `--mb 60`.

Files of every kind are made with numbers that go on, as a server would have written them, each into
a file, which is imported by a process of its own. `--keep FOLDER` leaves the files there.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

from tests.support.captures import load

_STAMP = re.compile(r"\d+\.\d\d\.\d{3}\.\d{3} ([IWEDC]) ")


class _Clock:
    """A server's time, as its log writes it."""

    def __init__(self) -> None:
        self.us = 212_220

    def __call__(self, us: int, level: str = "I") -> str:
        self.us += us
        rest, part = divmod(self.us, 1000)
        rest, ms = divmod(rest, 1000)
        return f"{rest // 60}.{rest % 60:02}.{ms:03}.{part:03} {level} "


def _sums(
    clock: _Clock, slot: int, task: int, chance: random.Random, n: int, drafts: tuple[int, int]
) -> Iterator[str]:
    head = f"slot print_timing: id {slot:2} | task {task} | "
    ms, (accepted, drafted) = 30.5 * n, drafts
    prompt = chance.randrange(20, 4000)
    yield (
        f"{clock(20)}{head}prompt eval time = {prompt * 1.5:10.2f} ms / {prompt:5} tokens "
        f"({1.5:8.2f} ms per token, {666.67:8.2f} tokens per second)"
    )
    yield (
        f"{clock(18)}{head}       eval time = {ms:10.2f} ms / {n:5} tokens "
        f"({ms / n:8.2f} ms per token, {1e3 * n / ms:8.2f} tokens per second)"
    )
    yield f"{clock(1)}{head}      total time = {ms + prompt:10.2f} ms / {n + prompt:5} tokens"
    yield f"{clock(10)}{head}   graphs reused = {task:10}"
    yield (
        f"{clock(6)}{head}draft acceptance = {accepted / drafted:.5f} ({accepted:5} accepted / "
        f"{drafted:5} generated), mean acceptance length = {1 + accepted / (drafted / 2):5.2f}, "
        f"acceptance rate per position = ({accepted / drafted:.3f}, {accepted / drafted:.3f})"
    )
    yield (
        f"{clock(100)}slot      release: id {slot:2} | task {task} | stop processing: n_tokens = "
        f"{n + prompt - 1}, truncated = 0"
    )


_START = (
    "0.00.001.342 I srv  llama_server: initializing ...",
    "0.00.005.103 I srv    load_model: loading model '/models/model.gguf'",
    "0.00.193.102 I srv  llama_server: model loaded",
)


def _light(chance: random.Random) -> Iterator[str]:
    """Rounds with a draft, of two slots that work at the same time."""
    clock, task = _Clock(), 0
    yield from _START
    while True:
        for slot in (0, 1):
            yield (
                f"{clock(10)}slot get_availabl: id {slot:2} | task -1 | selected slot by LRU, "
                f"t_last = {clock.us}"
            )
            yield (
                f"{clock(10)}slot launch_slot_: id {slot:2} | task {task + slot} | processing "
                "task, is_child = 0"
            )
        sums = [[1, 0, 0], [1, 0, 0]]
        for _ in range(600):
            slot, drafted = chance.randrange(2), chance.choice((3, 3, 3, 2, 16))
            accepted = chance.randrange(drafted + 1)
            sums[slot] = [
                a + b for a, b in zip(sums[slot], (accepted + 1, accepted, drafted), strict=True)
            ]
            yield (
                f"{clock(3000)}slot   operator(): id {slot:2} | task {task + slot} | accepted "
                f"{accepted:2}/{drafted:2} draft tokens"
            )
        for slot, (n, *drafts) in enumerate(sums):
            yield from _sums(clock, slot, task + slot, chance, n, (drafts[0], drafts[1]))
        task += 2


def _default(chance: random.Random) -> Iterator[str]:
    """A server at its default verbosity."""
    clock, task = _Clock(), 0
    yield from _START
    while True:
        n = chance.randrange(50, 700)
        yield (f"{clock(90)}srv  params_from_: Chat format: peg-native")
        yield (
            f"{clock(10)}slot get_availabl: id  0 | task -1 | selected slot by LCP similarity, "
            f"sim_best = 0.{chance.randrange(100, 999)} (> 0.100 thold), f_keep = 0.912"
        )
        yield f"{clock(10)}slot launch_slot_: id  0 | task {task} | processing task, is_child = 0"
        for part in range(100, n, 100):
            yield (
                f"{clock(3_000_000)}slot print_timing: id  0 | task {task} | n_gen = {part:6}, tg "
                f"= {31.44:6.2f} t/s, tg_3s = {31.75:6.2f} t/s"
            )
        drafted = 2 * (n // 4)
        drafts = chance.randrange(drafted // 4, drafted), drafted
        yield from _sums(clock, 0, task, chance, n, drafts)
        yield f"{clock(10)}srv  update_slots: all slots are idle"
        yield (
            f"{clock(50)}srv  log_server_r: done request: POST /v1/chat/completions 127.0.0.1 200"
        )
        task += n + 3


def _verbose(chance: random.Random) -> Iterator[str]:
    """A captured log with -lv 5, its requests again and again."""
    clock, lines = _Clock(), load("mtp").log.split("\n")
    n = 0
    while True:
        for line in lines:
            head, mark, rest = line.partition(" | task ")
            if mark and rest[:1].isdigit():
                number, bar, rest = rest.partition(" ")
                line = f"{head}{mark}{int(number) + n * 1000}{bar}{rest}"
            yield _STAMP.sub(lambda found: clock(120, found[1]), line)
        if not n:  # what a server says when it starts is not said again
            lines = lines[next(i for i, one in enumerate(lines) if "launch_slot_" in one) :]
        n += 1


def _filtered(chance: random.Random) -> Iterator[str]:
    """Of the same log what rounds are read from."""
    words = (" | task ", "draft candidate", "called impl")
    return (one for one in _verbose(chance) if any(word in one for word in words))


def _vllm(chance: random.Random) -> Iterator[str]:
    at = 0
    while True:
        at += 10
        day, second = divmod(at, 86400)
        steps = chance.randrange(100, 900)
        counts = sorted((chance.randrange(steps) for _ in range(3)), reverse=True)
        a, d = sum(counts), 3 * steps
        rates = ", ".join(f"{one / steps:.3f}" for one in counts)
        when = f"{1 + day // 28 % 12:02}-{1 + day % 28:02} {second // 3600:02}:"
        yield (
            f"(APIServer pid=4411) INFO {when}{second // 60 % 60:02}:{second % 60:02} "
            f"[metrics.py:101] SpecDecoding metrics: Mean acceptance length: {1 + a / steps:.2f}, "
            f"Accepted throughput: {a / 10:.2f} tokens/s, Drafted throughput: {d / 10:.2f} "
            f"tokens/s, Accepted: {a} tokens, Drafted: {d} tokens, Per-position acceptance rate: "
            f"{rates}, Avg Draft acceptance rate: {100 * a / d:.1f}%"
        )


def _sglang(chance: random.Random) -> Iterator[str]:
    at = 0
    while True:
        at += 1
        when = f"2026-06-{1 + at // 86400 % 28:02} {at // 3600 % 24:02}:{at // 60 % 60:02}"
        yield (
            f"[{when}:{at % 60:02}] Decode batch, #running-req: {chance.randrange(1, 9)}, #token: "
            f"{chance.randrange(9000)}, token usage: 0.01, accept len: "
            f"{1 + 3 * chance.random():.2f}, accept rate: {chance.random():.2f}, cuda graph: True, "
            f"gen throughput (token/s): {100 * chance.random():.2f}, #queue-req: 0"
        )


def _old(chance: random.Random) -> Iterator[str]:
    """A build of 2025: sums are lines without a slot."""
    task = 0
    while True:
        n, prompt = chance.randrange(50, 700), chance.randrange(9, 4000)
        accepted = chance.randrange(n // 4, n)
        yield f"slot launch_slot_: id  0 | task {task} | processing task"
        yield (
            f"slot update_slots: id  0 | task {task} | new prompt, n_ctx_slot = 8192, n_keep = 0, "
            f"n_prompt_tokens = {prompt}"
        )
        yield f"slot update_slots: id  0 | task {task} | n_past = 0, memory_seq_rm [0, end)"
        yield f"slot print_timing: id  0 | task {task} | "
        yield (
            f"prompt eval time = {prompt * 1.5:10.2f} ms / {prompt:5} tokens ({1.5:8.2f} ms per "
            f"token, {666.67:8.2f} tokens per second)"
        )
        yield (
            f"       eval time = {n * 30.5:10.2f} ms / {n:5} tokens ({30.5:8.2f} ms per token, "
            f"{32.79:8.2f} tokens per second)"
        )
        yield f"      total time = {n * 30.5:10.2f} ms / {n + prompt:5} tokens"
        rate = accepted / n
        yield f"draft acceptance rate = {rate:.5f} ({accepted:5} accepted / {n:5} generated)"
        yield f"slot      release: id  0 | task {task} | stop processing: n_past = 20"
        yield "srv  update_slots: all slots are idle"
        task += n + 3


def _prefixed(make: Callable[[int], str]) -> Callable[[random.Random], Iterator[str]]:
    def lines(chance: random.Random) -> Iterator[str]:
        return (make(i) + line for i, line in enumerate(_light(chance)))

    return lines


def _docker_json(chance: random.Random) -> Iterator[str]:
    for i, line in enumerate(_light(chance)):
        when = f"2026-08-15T{i // 3600 % 24:02}:{i // 60 % 60:02}:{i % 60:02}.{i % 997 * 1001}Z"
        yield json.dumps({"log": f"{line}\n", "stream": "stderr", "time": when})


def _router(chance: random.Random) -> Iterator[str]:
    """Two models of a router, whose lines come as they are written."""
    for line, other in zip(_default(chance), _default(chance), strict=False):
        yield f"[53409] {line}"
        yield f"[53410] {other}"


def _stream(chance: random.Random, is_timed: bool) -> Iterator[str]:
    """Streams that were kept, a chunk in each line."""
    number = 0
    while True:
        number += 1
        base = {"id": f"chatcmpl-{number:08}", "object": "chat.completion.chunk", "model": "m"}
        ms, left, drafted, accepted = 300.0, 0, 0, 0
        for n in range(1, chance.randrange(100, 400)):
            word = chance.choice((" the", " of", ",", " draft", "\n", ' "'))
            choice: dict[str, object] = {"index": 0, "delta": {"content": word}}
            if left == 0 and n > 1:
                left = chance.randrange(4)
                drafted, accepted, ms = drafted + 3, accepted + left, ms + 30.1
            else:
                left = max(left - 1, 0)
            if is_timed:
                told = {"cache_n": 0, "prompt_n": 20, "prompt_ms": 300.1, "predicted_n": n}
                told |= {"predicted_ms": round(ms, 3), "predicted_per_second": 1e3 * n / ms}
                told |= {"draft_n": drafted, "draft_n_accepted": accepted}
                yield json.dumps(base | {"choices": [choice], "timings": told})
            else:
                choice["token_ids"] = [chance.randrange(150_000)]
                yield json.dumps(base | {"choices": [choice]})
        yield json.dumps(base | {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})


def _events(chance: random.Random) -> Iterator[str]:
    """The same as a client received them, from a server that gives ids."""
    for line in _stream(chance, is_timed=False):
        yield f"data: {line}"
        yield ""


def _replies(chance: random.Random, has_ids: bool) -> Iterator[str]:
    """Replies in one piece of some 500 tokens: llama-server's with ids, else of the OpenAI API."""
    while True:
        n = chance.randrange(400, 600)
        text = " ".join(chance.choice(("the", "of", "draft", "token")) for _ in range(n))
        if has_ids:
            ms = {"prompt_ms": 80.5, "predicted_ms": 20.5 * n, "predicted_per_second": 1e3 / 20.5}
            told = {"cache_n": 0, "prompt_n": 300, "predicted_n": n} | ms
            told |= {"draft_n": n, "draft_n_accepted": chance.randrange(n)}
            ids = [chance.randrange(150_000) for _ in range(n)]
            counts = {"tokens_predicted": n, "tokens_evaluated": 300, "timings": told}
            yield json.dumps({"content": text, "tokens": ids, "stop": True} | counts)
        else:
            answer = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 300, "completion_tokens": n, "total_tokens": 300 + n}
            yield json.dumps({"object": "chat.completion", "choices": [answer], "usage": usage})


def _aiperf(chance: random.Random) -> Iterator[str]:
    """AIPerf's records, of some 60 steps each."""
    while True:
        accepted = [chance.randrange(4) for _ in range(chance.randrange(40, 80))]
        n, steps = sum(accepted), len(accepted)
        counts = {str(k): accepted.count(k) for k in range(4) if k in accepted}
        ratios = {"mean_acceptance_length": 1 + n / steps, "draft_acceptance_rate": n / steps / 3}
        sums = {"num_accepted_draft_tokens": n, "num_draft_tokens": 3 * steps}
        sums |= {"num_spec_steps": steps, "num_spec_tokens": 3, "completion_tokens": n + steps + 1}
        lists = {"per_step_accepted": accepted, "per_step_drafted": [3] * steps}
        said = {"engine": "vllm"} | ratios | {"acceptance_histogram": counts} | sums | lists
        yield json.dumps({"metadata": {"session_num": n}, "spec_decode": said})


def _steps(chance: random.Random) -> Iterator[str]:
    """vLLM's replies with ids and with what each step accepted."""
    for number, line in enumerate(_aiperf(chance)):
        said = json.loads(line)["spec_decode"]
        n = said.pop("completion_tokens")
        del said["engine"]
        said["acceptance_histogram"] = [said["per_step_accepted"].count(k) for k in range(4)]
        ids = [chance.randrange(150_000) for _ in range(n)]
        answer = {"index": 0, "message": {"content": "x" * n}, "token_ids": ids}
        usage = {"prompt_tokens": 17, "completion_tokens": n, "total_tokens": n + 17}
        reply = {"id": f"c-{number}", "object": "chat.completion", "model": "m", "usage": usage}
        reply |= {"choices": [answer | {"finish_reason": "stop"}]}
        yield json.dumps(reply | {"metrics": {"speculative_decoding": said}})


def _ollama(chance: random.Random) -> Iterator[str]:
    while True:
        n = chance.randrange(100, 400)
        for i in range(n):
            when = f"2026-09-01T10:{i // 60 % 60:02}:{i % 60:02}.{i * 137 % 1000:03}Z"
            said = {"role": "assistant", "content": chance.choice((" the", " of", ",", "\n"))}
            yield json.dumps({"model": "m", "created_at": when, "message": said, "done": False})
        counts = {"prompt_eval_count": 20, "eval_count": n, "eval_duration": n * 20_000_000}
        end = {"model": "m", "created_at": when, "done": True, "done_reason": "stop"}
        yield json.dumps(end | {"message": {"role": "assistant", "content": ""}} | counts)


def _table(chance: random.Random, n_others: int) -> Iterator[str]:
    """CSV, of 46 columns with 40 others."""
    names = [f"setting_{i}" for i in range(n_others)]
    yield ",".join(["prompt", "num_draft_tokens", "num_accepted_tokens", "acceptance_rate",
                    "mean_acceptance_length", "tok/s", *names])  # fmt: skip
    for number in count(1):
        steps = chance.randrange(20, 400)
        n = chance.randrange(steps, 2 * steps)
        counts = f"{3 * steps},{n},{n / steps / 3:.4f},{1 + n / steps:.4f},{60 * n / steps:.2f}"
        yield ",".join([f"p {number}", counts, *(f"{chance.random() * 1e6:.6f}" for _ in names)])


def _scrapes(chance: random.Random) -> Iterator[str]:
    """Prometheus text of one server, again and again."""
    begin, label, counts = "vllm:spec_decode_num", 'engine="0",model_name="example"', [0, 0, 0]
    for drafts in count(100, 100):
        counts = [
            a + chance.randrange(b, b + 20) for a, b in zip(counts, (60, 40, 20), strict=True)
        ]
        sums = {"drafts": drafts, "draft_tokens": 3 * drafts, "accepted_tokens": sum(counts)}
        for name, n in sums.items():
            yield f"# HELP {begin}_{name}_total Number of it."
            yield f"# TYPE {begin}_{name}_total counter"
            yield f"{begin}_{name}_total{{{label}}} {n}.0"
        yield f"# TYPE {begin}_accepted_tokens_per_pos_total counter"
        for i, n in enumerate(counts):
            yield f'{begin}_accepted_tokens_per_pos_total{{{label},position="{i}"}} {n}.0'
        for i in range(60):
            yield f'http_request_size_bytes_bucket{{handler="/v1",le="{i}"}} {drafts + i}.0'


def _of_har(chance: random.Random) -> Iterator[str]:
    for reply in _replies(chance, has_ids=False):
        said = json.loads(reply) | {"timings": {"prompt_n": 300, "prompt_ms": 80.5}}
        n = said["usage"]["completion_tokens"]
        said["timings"] |= {"predicted_n": n, "predicted_ms": 20.5 * n, "draft_n": n}
        said["timings"] |= {"draft_n_accepted": chance.randrange(n // 4, n)}
        request = {"method": "POST", "url": "http://box/v1/chat/completions", "headers": []}
        request["postData"] = {"text": json.dumps({"model": "m", "stream": False})}
        response = {"status": 200, "content": {"text": json.dumps(said)}}
        yield json.dumps({"time": 20.5 * n, "request": request, "response": response})


def _of_capture(chance: random.Random) -> Iterator[str]:
    """Requests of a capture, of a stream each."""
    events: list[list[object]] = []
    at = 0.0
    for line in _stream(chance, is_timed=True):
        at += 12.5
        events.append([at, f"data: {line}"])
        if '"finish_reason"' in line:
            reply = {"sent_ms": events[0][0], "status": 200, "done_ms": at, "events": events}
            reply |= {"headers": {"Content-Type": "text/event-stream"}, "head_ms": events[0][0]}
            body = {"stream": True, "timings_per_token": True}
            yield json.dumps({"path": "/v1/chat/completions", "body": body, "reply": reply})
            events = []


KINDS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "light": _light,
    "default": _default,
    "verbose": _verbose,
    "filtered": _filtered,
    "vllm": _vllm,
    "sglang": _sglang,
    "old": _old,
    "compose": _prefixed(lambda i: "llama-1  | "),
    "docker": _prefixed(
        lambda i: f"2026-08-15T{i // 3600 % 24:02}:{i // 60 % 60:02}:{i % 60:02}.{i % 997:03}Z "
    ),
    "journald": _prefixed(
        lambda i: (
            f"Aug {1 + i // 86400 % 28:2} {i // 3600 % 24:02}:{i // 60 % 60:02}:{i % 60:02} "
            "box llama-server[2211]: "
        )
    ),
    "json": _docker_json,
    "router": _router,
}
STREAMS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "chunks": partial(_stream, is_timed=True),
    "events": _events,
    "replies": partial(_replies, has_ids=True),
    "plain": partial(_replies, has_ids=False),
    "aiperf": _aiperf,
    "steps": _steps,
    "ollama": _ollama,
    "table": partial(_table, n_others=40),
    "csv": partial(_table, n_others=0),
    "scrapes": _scrapes,
}
DOCUMENTS: dict[str, tuple[str, Callable[[random.Random], Iterator[str]], str]] = {
    "har": ('{"log": {"version": "1.2", "entries": [', _of_har, "]}}"),
    "list": ("[", lambda chance: map(json.dumps, _default(chance)), "]"),
    "chunk-list": ("[", partial(_stream, is_timed=True), "]"),
    "capture": ('{"format": "draftscope-capture", "requests": [', _of_capture, "]}"),
}
"""Values of JSON: before their elements, these, after them."""


def write_log(path: Path, kind: str, n_bytes: int, seed: int = 1) -> None:
    """A log of a kind, of a size."""
    n, chance = 0, random.Random(seed)
    begin, lines, end = DOCUMENTS.get(kind) or ("", (KINDS | STREAMS)[kind], "")
    with path.open("w") as file:
        file.write(begin)
        for line in lines(chance):
            file.write(f"{',' if n and end else ''}{line}\n")
            n += len(line) + 1
            if n >= n_bytes:
                break
        file.write(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS | STREAMS | DOCUMENTS)}"
    )
    parser.add_argument("--mb", type=int, default=100, help="size of each, 10^6 bytes")
    parser.add_argument("--keep", type=Path, help="folder that the files are left in")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        for kind in args.kinds or (KINDS | STREAMS | DOCUMENTS):
            path = folder / f"{kind}-{args.mb}.log"
            if not path.exists():
                write_log(path, kind, args.mb * 10**6)
            before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "app", "import", str(path)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begin
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(
                f"{kind:10} {args.mb} MB  {cpu:6.2f} CPU s  {wall:6.2f} s  most memory so far "
                f"{after.ru_maxrss / 1024:.0f} MiB  {(done.stdout or done.stderr).strip()[:200]}",
                flush=True,
            )  # fmt: skip
            if args.keep is None:
                path.unlink()


if __name__ == "__main__":
    main()
