"""The `openai` package as a client whose bytes are kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx

PROMPT = "def quicksort(arr):"


class Reader:
    """A client of the `openai` package that keeps the bytes it was sent."""

    def __init__(self, url: str) -> None:
        import openai

        self.bytes: dict[str, bytes] = {}
        http = httpx.Client(trust_env=False, verify=False, event_hooks={"response": [self._keep]})
        self.client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="secret", http_client=http, max_retries=0, timeout=60
        )

    def _keep(self, response: httpx.Response) -> None:
        kept, stream = [], response.stream
        path = response.request.url.path

        class Kept(httpx.SyncByteStream):
            def __iter__(self) -> Iterator[bytes]:
                assert isinstance(stream, httpx.SyncByteStream)
                for piece in stream:
                    kept.append(piece)
                    yield piece

            def close(self) -> None:
                outer.bytes[path] = b"".join(kept)
                stream.close()  # type: ignore[union-attr]

        outer = self
        response.stream = Kept()

    def chat(self, n: int, **more: Any) -> str:
        chunks = self.client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=n,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=more,
        )
        texts = []
        for chunk in chunks:
            assert (
                chunk.model_extra is None
                or chunk.choices == []
                or ("timings" not in chunk.model_extra)
            )
            texts += [choice.delta.content or "" for choice in chunk.choices]
        return "".join(texts)

    def complete(self, n: int, **more: Any) -> str:
        chunks = self.client.completions.create(
            model="any", prompt=PROMPT, max_tokens=n, temperature=0, stream=True, extra_body=more
        )
        texts = []
        for chunk in chunks:
            assert "__verbose" not in (chunk.model_extra or {})
            texts += [choice.text for choice in chunk.choices]
        return "".join(texts)

    def plain(self, n: int, **more: Any) -> str:
        reply = self.client.completions.create(
            model="any", prompt=PROMPT, max_tokens=n, temperature=0, extra_body=more
        )
        return reply.choices[0].text


def told_apart_from_time(reply: bytes) -> bytes:
    """A reply without what differs between two equal requests: times and random names."""
    reply = re.sub(rb'("[a-z_]+_(?:ms|second)"):[^,}]+', rb"\1:0", reply)
    reply = re.sub(rb'"(id|item_id)":"[a-z]+[-_]\w+"', rb'"\1":""', reply)
    return re.sub(rb'"created(_at)?":\d+', b'"created":0', reply)
