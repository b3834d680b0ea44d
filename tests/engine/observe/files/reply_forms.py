"""Replies of several engines, in the forms in which people keep them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from engine.analysis.findings.check import recorded
from engine.observe.files.records import fill, recognise
from engine.trace.store import TraceStore

TIMINGS = {
    "cache_n": 0,
    "prompt_n": 100,
    "prompt_ms": 108.536,
    "predicted_n": 400,
    "predicted_ms": 3173.053,
    "draft_n": 374,
    "draft_n_accepted": 339,
}
MEMBER = f'  "timings": {json.dumps(TIMINGS, indent=4)}'
HEAD = "HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: application/json\r\n\r\n"
CURL = (
    "* Connected to localhost (127.0.0.1) port 8080\n> POST /completion HTTP/1.1\n> Accept: */*\n"
    "< HTTP/1.1 200 OK\n< Content-Type: application/json\n<\n"
)


def filled(data: Any, name: str | None = None) -> TraceStore:
    store = TraceStore()
    text = data if isinstance(data, str) else json.dumps(data)
    raw = text.encode()
    assert name is not None or recognise(raw) is not None
    fill(store, raw, "kept", name)
    return store


def rules(store: TraceStore) -> list[str]:
    return [one.rule for one in recorded(store)]


def tokens(store: TraceStore, *columns: str) -> list[tuple[Any, ...]]:
    rows = (store.tokens.row(i) for i in range(len(store.tokens)))
    return [tuple(row[name] for name in columns) for row in rows]


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def sse(*values: Any, ends: str = "\n") -> str:
    return "".join(f"data: {json.dumps(value)}{ends}{ends}" for value in values)


# -- streams as objects ------------------------------------------------------------------------


def clock(n: int, ms: float, drafted: int = 0, accepted: int = 0) -> dict[str, Any]:
    said = {"cache_n": 0, "prompt_n": 12, "prompt_ms": 20.5, "predicted_n": n, "predicted_ms": ms}
    return said | ({"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {})


STEPS = ((1, 0.02, 0, 0), (2, 30.0, 3, 2), (3, 30.0, 3, 2), (4, 30.0, 3, 2), (5, 41.0, 6, 2))
"""A first token, a round of three tokens, one of which only the replacement is left."""


def chat(name: str = "chatcmpl-a", **more: Any) -> list[dict[str, Any]]:
    base = {"id": name, "object": "chat.completion.chunk", "model": "q"}

    def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**base, "choices": [{"index": 0, "finish_reason": reason, "delta": delta}], **more}

    found = [chunk({"role": "assistant", "content": None}) | {"timings": None}]
    keys = ("reasoning_content", "content", "content", "content", "content")
    found += [
        chunk({key: f"w{step[0]}"}) | {"timings": clock(*step)}
        for key, step in zip(keys, STEPS, strict=True)
    ]
    return [*found, chunk({}, "stop") | {"timings": clock(*STEPS[-1])}]


def completion(prompt_ms: float = 20.5) -> list[dict[str, Any]]:
    found = [
        {
            "index": 0,
            "content": f"w{step[0]}",
            "tokens": [100 + step[0]],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": step[0],
            "tokens_evaluated": 12,
            "timings": clock(*step) | {"prompt_ms": prompt_ms},
        }
        for step in STEPS
    ]
    last = {"content": "", "tokens": [], "stop": True, "stop_type": "eos", "prompt": "def f("}
    return [*found, {**found[-1], **last}]


def text_completion() -> list[dict[str, Any]]:
    return [
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "choices": [{"index": 0, "text": f"w{step[0]}", "finish_reason": None}],
            "timings": clock(*step),
        }
        for step in STEPS
    ] + [{"id": "cmpl-1", "choices": [{"index": 0, "text": "", "finish_reason": "length"}]}]


def responses() -> list[dict[str, Any]]:
    created = {"type": "response.created", "response": {"id": "resp_1"}}
    deltas = [
        {"type": "response.output_text.delta", "delta": f"w{step[0]}", "timings": clock(*step)}
        for step in STEPS
    ]
    done = {"type": "response.completed", "response": {"id": "resp_1", "status": "completed"}}
    return [created, *deltas, done | {"timings": clock(*STEPS[-1])}]


KEPT: dict[str, Callable[[list[Any]], Any]] = {
    "lines": lambda chunks: lines(*chunks),
    "list": lambda chunks: chunks,
    "under a key": lambda chunks: {"model": "q", "chunks": chunks},
    "events": lambda chunks: sse(*chunks) + "data: [DONE]\n\n",
    "events without blank lines": lambda chunks: sse(*chunks).replace("\n\n", "\n"),
    "events with CRLF and a head": lambda chunks: (
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + sse(*chunks, ends="\r\n")
    ),
    "events with times": lambda chunks: "".join(
        f"12:00:0{i}.123 {line}\n" for i, line in enumerate(sse(*chunks).split("\n\n")) if line
    ),
    "values in a row": lambda chunks: "\n".join(json.dumps(one, indent=2) for one in chunks),
    "lines with a comma": lambda chunks: ",\n".join(map(json.dumps, chunks)),
    "a cut last line": lambda chunks: lines(*chunks) + json.dumps(chunks[-1])[:40],
}
FORMS = {"chat": chat, "completion": completion, "text": text_completion, "responses": responses}


# -- ids of replies in one piece ---------------------------------------------------------------


def vllm(ids: list[int], **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": "abc", "finish_reason": "length", "token_ids": ids}
    usage = {"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 3 + len(ids)}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [choice | {"prompt_token_ids": [1, 2, 3]}],
        "usage": usage,
        **more,
    }


def counted(n: int) -> dict[str, Any]:
    return {
        "num_spec_steps": 4,
        "num_draft_tokens": 12,
        "num_accepted_draft_tokens": n,
        "mean_acceptance_length": 1 + n / 4,
        "draft_acceptance_rate": n / 12,
    }


def llama(ids: list[int], **more: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "content": "abc",
        "tokens": ids,
        "stop": True,
        "stop_type": "limit",
        "prompt": "def f(",
        "generation_settings": {"temperature": 0.0, "speculative.types": "none"},
        "tokens_predicted": len(ids),
        "tokens_evaluated": 3,
        "timings": clock(len(ids), 30.0) | {"prompt_n": 3},
        **more,
    }


def sglang(ids: list[int], **more: Any) -> dict[str, Any]:
    about = {"id": "a", "finish_reason": {"type": "length", "length": 4}, "prompt_tokens": 3}
    about |= {"completion_tokens": len(ids), "cached_tokens": 1, **more}
    return {"text": "abc", "output_ids": ids, "meta_info": about}


def sglang_listed(ids: list[int]) -> dict[str, Any]:
    rows = [[-0.5, one, None] for one in ids]
    prompt = [[None, 1, None], [-1.5, 2, None], [-2.5, 3, None]]
    kept = sglang(ids, output_token_logprobs=rows, input_token_logprobs=prompt)
    del kept["output_ids"]
    return kept


def logged(ids: list[int]) -> dict[str, Any]:
    body = vllm(ids)
    (choice,) = body["choices"]
    del choice["token_ids"], choice["text"]
    content = [{"token": f"token_id:{one}", "logprob": -0.5, "top_logprobs": []} for one in ids]
    choice |= {"message": {"role": "assistant", "content": "abc"}, "logprobs": {"content": content}}
    return body


def logged_texts(ids: list[int]) -> dict[str, Any]:
    body = vllm(ids)
    del body["choices"][0]["token_ids"]
    names = [f"token_id:{one}" for one in ids]
    body["choices"][0]["logprobs"] = {"tokens": names, "token_logprobs": [-0.5] * len(ids)}
    return body


def verbose(ids: list[int]) -> dict[str, Any]:
    kept = {key: value for key, value in llama(ids).items() if key not in ("timings", "stop")}
    choice = {"index": 0, "message": {"content": "abc"}, "finish_reason": "length"}
    return {"choices": [choice], "__verbose": {**kept, "stop": True}, "timings": clock(4, 30.0)}


def cut_by_jq(ids: list[int]) -> dict[str, Any]:
    return {"tokens": ids, "tokens_predicted": len(ids), "tokens_evaluated": 3}


REPLIES: dict[str, tuple[Callable[[list[int]], dict[str, Any]], str, bool]] = {
    "vllm completions": (vllm, "vllm", True),
    "vllm chat": (lambda ids: {**logged(ids), "prompt_token_ids": [1, 2, 3]}, "vllm", True),
    "vllm logprobs of completions": (logged_texts, "vllm", True),
    "vllm with speculation": (
        lambda ids: vllm(ids, metrics={"speculative_decoding": counted(6)}),
        "vllm",
        True,
    ),
    "sglang": (sglang, "sglang", False),
    "sglang logprobs": (sglang_listed, "sglang", True),
    "llama-server": (llama, "llama-server", False),
    "llama-server with verbose": (verbose, "llama-server", False),
    "llama-server, a part": (cut_by_jq, "llama-server", False),
}


def streamed(step: Callable[[int], dict[str, Any]], last: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(step(i) for i in range(4)), last]


def vllm_chunk(i: int) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": "abcd"[i]}, "token_ids": [10 + i]}
    first = {"prompt_token_ids": [1, 2, 3]} if not i else {}
    return {"id": "x", "choices": [{**choice, "finish_reason": None}], **first}


def sglang_chunk(i: int, *, is_whole: bool = True) -> dict[str, Any]:
    start = 0 if is_whole else i
    about = {"id": "s", "prompt_tokens": 3, "completion_tokens": i + 1}
    about["finish_reason"] = {"type": "stop"} if i == 3 else None
    return {"text": "abcd"[start : i + 1], "output_ids": [*range(10 + start, 11 + i)]} | {
        "meta_info": about
    }


USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
STREAMS: dict[str, list[dict[str, Any]]] = {
    "vllm": [
        *streamed(vllm_chunk, {"id": "x", "choices": [{"delta": {}, "finish_reason": "stop"}]}),
        {"id": "x", "choices": [], "usage": USAGE},
    ],
    "sglang": [sglang_chunk(i) for i in range(4)],
    "sglang in parts": [sglang_chunk(i, is_whole=False) for i in range(4)],
    "llama-server without timings": streamed(
        lambda i: {
            "content": "abcd"[i],
            "tokens": [10 + i],
            "stop": False,
            "tokens_predicted": i + 1,
            "tokens_evaluated": 3,
        },
        {"content": "", "tokens": [], "stop": True, "tokens_predicted": 4, "tokens_evaluated": 3},
    ),
}


def openai(text: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    return {
        "id": "chatcmpl-9",
        "object": "chat.completion",
        "choices": [{**choice, "finish_reason": "stop"}],
        "usage": USAGE,
        **more,
    }
