"""Options of a request: our run options that a server takes, and its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.errors import OptionError
from engine.observe.rounds.observed_run import ServerFacts
from engine.observe.server.client import ServerClient
from engine.option_fields import NumberRange, PlacedOption, check, json_object, option
from engine.options import RunOptions

PER_REQUEST: dict[tuple[str, ...], str] = {
    ("n_predict",): "n_predict",
    ("ignore_eos",): "ignore_eos",
    ("sampler", "temp"): "temperature",
    ("sampler", "top_k"): "top_k",
    ("sampler", "top_p"): "top_p",
    ("sampler", "min_p"): "min_p",
    ("sampler", "typical_p"): "typical_p",
    ("sampler", "seed"): "seed",
    ("sampler", "repeat_penalty"): "repeat_penalty",
    ("sampler", "repeat_last_n"): "repeat_last_n",
    ("sampler", "presence_penalty"): "presence_penalty",
    ("sampler", "frequency_penalty"): "frequency_penalty",
    ("sampler", "logit_bias"): "logit_bias",
}
"""Our options that a request carries, by path, and the server's names of them."""

_OURS = (("parallel",),)
"""Options applied on our side: how many requests are sent at once."""

_FIXED = ("prompt", "stream", "timings_per_token")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What only llama-server takes with a request. fields: any others by name, whose meaning the
    server decides. Raises OptionError for one of _FIXED."""

    GROUP: ClassVar[str] = "request"
    stop: tuple[str, ...] = option(
        (), "--stop TEXT  stop string, at which the server ends the reply; repeatable", repeats=True
    )
    cache_prompt: bool = option(
        False,
        "--cache-prompt  let the server reuse the part of the prompt that its slot has in cache; "
        "drafts then depend on the slot's earlier requests",
    )
    id_slot: int | None = option(
        None,
        "--id-slot  slot of the server for the requests (default: any idle one)",
        NumberRange(0, 2**16, "Name a slot from 0."),
    )
    n_probs: int = option(
        0,
        "--n-probs  number of top probabilities that the server sends with tokens that were not "
        "drafted",
        NumberRange(0, 1000, "Use 0 to 1000."),
    )
    fields: tuple[tuple[str, Any], ...] = option(
        (),
        "--request JSON  further fields of the request, as a JSON object",
        parse=lambda text: tuple(json_object(text).items()),
    )

    def __post_init__(self) -> None:
        check(self)
        for name, _ in self.fields:
            if name in _FIXED:
                raise OptionError(
                    f"--request sets {name}, which is needed to observe the rounds.",
                    "Leave that field out.",
                )


def why_not_sent(one: PlacedOption) -> str:
    """Why a server does not take one of our options with a request; empty if it does."""
    if one.path in PER_REQUEST or one.path in _OURS:
        return ""
    return "A request cannot set this; it is an option of the server at its start."


@dataclass(frozen=True)
class ServerRequest:
    """One request: its path, its JSON, and the prompt as shown to the user."""

    path: str
    body: Mapping[str, Any]
    text: str = ""

    @property
    def raw(self) -> bytes:
        """The bytes to send. Raises OptionError for text that is not Unicode."""
        try:
            return json.dumps(self.body, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise OptionError("The prompt is not UTF-8 text.", "Convert it to UTF-8.") from error


_TAKES = {
    "vllm": ("top_k", "min_p", "repeat_penalty", "ignore_eos"),
    "sglang": ("top_k", "min_p", "repeat_penalty", "ignore_eos"),
}
_ALSO: dict[str, dict[str, Any]] = {
    "vllm": {"return_token_ids": True},
    "llama-swap": {"timings_per_token": True},  # forwards to llama-servers
}
"""Fields that engines take in addition to the OpenAI API."""
_NAMES = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": ()}


def request_for(
    client: ServerClient,
    server: ServerFacts,
    source: str | Sequence[int],
    options: RunOptions,
    more: RequestOptions | None = None,
    chat: Mapping[str, Any] | None = None,
) -> ServerRequest:
    """A request to continue a prompt, text or ids, in the server's format.

    chat: the text is a user's message for the server's chat template, with these variables. A
    llama-server renders it to a prompt, which is then continued as usual: its chat endpoint would
    not give token ids. Raises ServerError.
    """
    is_chat = chat is not None and isinstance(source, str)
    if not server.is_llama_server:
        return _openai(server, source, options, more or RequestOptions(), chat if is_chat else None)
    if chat is not None and isinstance(source, str):
        source = client.chat_prompt(source, chat)
    return completion(source, options, more, server.model)


def completion(
    prompt: str | Sequence[int],
    options: RunOptions,
    more: RequestOptions | None = None,
    model: str = "",
) -> ServerRequest:
    """A request to a llama-server to continue a prompt so that rounds can be read: a stream with
    the timings of every token, by default without the slot's cache. model: one of a router's."""
    more = more or RequestOptions()
    body: dict[str, Any] = {"model": model} if model else {}
    body |= {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "stream": True,
        "timings_per_token": True,
        "return_progress": True,
        "cache_prompt": more.cache_prompt,
    }
    values = ((name, _value(options, path)) for path, name in PER_REQUEST.items())
    body |= {name: [*map(list, one)] if isinstance(one, tuple) else one for name, one in values}
    if more.stop:
        body["stop"] = list(more.stop)
    if more.id_slot is not None:
        body["id_slot"] = more.id_slot
    if more.n_probs:
        body["n_probs"] = more.n_probs
    text = prompt if isinstance(prompt, str) else ""
    return ServerRequest("/completion", {**body, **dict(more.fields)}, text)


def _openai(
    server: ServerFacts,
    source: str | Sequence[int],
    options: RunOptions,
    more: RequestOptions,
    chat: Mapping[str, Any] | None,
) -> ServerRequest:
    """The same for a server of the OpenAI API, with its engine's extra fields."""
    body: dict[str, Any] = {"model": server.model}
    if chat is None:
        body["prompt"] = source if isinstance(source, str) else list(source)
    else:
        body["messages"] = [{"role": "user", "content": source}]
        if chat:
            body["chat_template_kwargs"] = dict(chat)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    taken = ("n_predict", "temperature", "top_p", "seed", *_NEUTRAL, *_TAKES.get(server.engine, ()))
    for path, name in PER_REQUEST.items():
        value = _value(options, path)
        is_unset = (name == "seed" and value < 0) or _NEUTRAL.get(name, ...) == value
        if name not in taken or is_unset:
            continue
        if name == "top_k" and not value:
            value = -1  # all, which is 0 for llama-server
        body[_NAMES.get(name, name)] = dict(value) if name == "logit_bias" else value
    body |= _ALSO.get(server.engine, {})
    if more.stop:
        body["stop"] = list(more.stop)
    if more.n_probs:
        fields = {"logprobs": True, "top_logprobs": more.n_probs}
        body |= {"logprobs": more.n_probs} if chat is None else fields
    endpoint = "/v1/completions" if chat is None else "/v1/chat/completions"
    text = source if isinstance(source, str) else ""
    return ServerRequest(endpoint, {**body, **dict(more.fields)}, text)


def _value(options: RunOptions, path: tuple[str, ...]) -> Any:
    value: Any = options
    for name in path:
        value = getattr(value, name)
    return value
