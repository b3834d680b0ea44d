"""Identity: whether the model that a server runs, or ran, is the opened file.

Five tests in this order, of which the first with a result counts: is it the same file on this
machine; do the server's model figures agree with the file; does the server tokenize a text equally;
does it give the first token after a few prefixes the same probabilities; and, with a server or
without, does the generated text look like the model's own (`by_text`). Requests are sent only if a
server is given, and probes, which disturb a slot's cache, only if allowed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from engine.gguf.content import HASH_S
from engine.gguf.file import GgufFile
from engine.gguf.tokenizer import Tokenizer
from engine.observe.server.address import is_loopback
from engine.sampling.distribution import softmax
from engine.trace.facts import RunFacts
from engine.trace.run_ref import same_model
from engine.trace.writer import this_engine

if TYPE_CHECKING:
    from engine.observe.server.client import ServerClient
    from engine.session import Session

SAME, LIKELY = "same", "same as far as can be known"
DIFFERENT, UNKNOWN = "different", "unknown"

LARGE_FILE = 2 << 30
"""Size above which a file is not hashed without permission, bytes."""
_CHUNK = 4 << 20
_LEAST_SHARE = 0.98
"""Least share of a text's tokens that must be the model's choice (fewer flip by the noise of a
server's arithmetic); another model with the same vocabulary agrees in about a tenth."""
_FEW = 16
"""Fewest tokens that can show that another model wrote a text."""
_HALF = math.log(2.0)
"""The logit gap of a token with half the probability of the one that should have been chosen."""
_MOST_DP = 0.05
_TIE_P = 0.02
"""Largest difference of a server's probabilities from ours on the same file; and the gap below
which two are a tie."""
_N_PROBS = 20
_ANY_TEXT = "def add(first, second):\n    return first + second\n"
"""Text to tokenize and probe with if the run has no prompt as text."""


@dataclass(frozen=True, slots=True)
class Identity:
    """verdict: SAME, LIKELY, DIFFERENT or UNKNOWN. reason: one sentence. is_requantised: of a
    DIFFERENT one, all figures but the bytes of its tensors agree."""

    verdict: str
    reason: str
    is_requantised: bool = False


Ask = Callable[[str, Mapping[str, Any] | None], Any]
"""Sends a body, None for GET, to a path of a server and returns its JSON, as ServerClient.ask."""


def identify(
    session: Session,
    facts: RunFacts,
    server: ServerClient | None = None,
    *,
    may_probe: bool = False,
) -> Identity:
    """Whether the model of a run is that of the session, as far as known without its generated
    text.

    server: one that still runs the run's model. may_probe: a few requests may disturb one of its
    slots. Raises ModelFileError for a file that can no longer be read, and ServerError.
    """
    model = facts.model
    if not is_observed(facts) or (model and "sha256" in model):
        return _by_identity(facts, session)
    if session.path is None:
        return Identity(UNKNOWN, "The opened model was not loaded from a file.")
    with GgufFile.open(session.unchanged_path()) as file:
        found = by_figures(told_figures(model), file)
        if server is None or found.verdict == DIFFERENT:
            return found
        props = server.ask("/props", None)
        path = props.get("model_path") if isinstance(props, dict) else None
        found = by_path(path, server.address, file)
        if found.verdict != UNKNOWN:
            return found
        found = by_figures(told_figures(server.ask("/v1/models", None)), file)
    prompts = (request.prompt for request in facts.requests or ())
    text = next((prompt for prompt in prompts if prompt is not None), "") or _ANY_TEXT
    if found.verdict == UNKNOWN:
        found = by_tokens(server.ask, text, session.tokenizer)
        if found.verdict == UNKNOWN and may_probe:
            found = by_probe(server.ask, session.tokenizer.encode(text), session)
    return found


def is_observed(facts: RunFacts) -> bool:
    """Whether another engine made a run."""
    return facts.source is not None and facts.source.engine != this_engine().engine


def _by_identity(facts: RunFacts, session: Session) -> Identity:
    """By the file that a run of this engine names. A copy, or a file with another template or other
    metadata, may be the same model: its text decides."""
    theirs, mine = facts.model, session.identity
    if not isinstance(theirs, dict):
        return Identity(DIFFERENT, "The run names no file.")
    is_alike = all(theirs.get(name) == mine[name] for name in ("size", "sha256"))
    is_large = mine["size"] > LARGE_FILE
    if is_alike and theirs.get("content") and not is_large and session.content is not None:
        session.content.find(HASH_S)
    if same_model({**theirs, "draft": None}, {**mine, "draft": None}):
        return Identity(SAME, "The run names this file.")
    contents = theirs.get("content"), mine["content"]
    if is_alike and all(contents):
        return Identity(DIFFERENT, "The run names another file, with other tensor contents.")
    if is_alike or (all(contents) and contents[0] == contents[1]):
        return Identity(UNKNOWN, "The run names a file with the same metadata or the same tensors.")
    is_as_large = facts.compute != session.compute or (
        facts.weight_bytes == session.model.weight_bytes
    )
    if facts.architecture == session.config.architecture and is_as_large:
        return Identity(UNKNOWN, "The run names another file of the same architecture and size.")
    return Identity(DIFFERENT, "The run names another file.")


# -- 1: the file ---------------------------------------------------------------------------


def by_path(model_path: Any, address: str, file: GgufFile) -> Identity:
    """SAME if the server is on this machine and has loaded this file, or one with the same
    bytes."""
    if not isinstance(model_path, str) or not is_loopback(urlsplit(address).hostname or ""):
        return Identity(UNKNOWN, "The server's file is not on this machine.")
    try:
        theirs, mine = Path(model_path), file.path
        if theirs.samefile(mine):
            return Identity(SAME, "The server has loaded this file.")
        size = theirs.stat().st_size
        if len(file.parts) > 1 or size != mine.stat().st_size:
            return Identity(UNKNOWN, "The server has loaded a file of another size.")
        if size > LARGE_FILE:
            return Identity(UNKNOWN, "The server's file has the same size and was not compared.")
        if _digest(theirs) == _digest(mine):
            return Identity(SAME, "The server has loaded a file with the same bytes.")
    except (OSError, ValueError):
        return Identity(UNKNOWN, "The server's file cannot be read from here.")
    return Identity(UNKNOWN, "The server has loaded a file with other bytes.")


def _digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.digest()


# -- 2: figures ----------------------------------------------------------------------------

_FIGURES = {
    "n_vocab": "tokens in the vocabulary",
    "n_ctx_train": "positions in training",
    "n_embd": "channels",
    "n_params": "parameters",
    "size": "bytes of tensors",
}


def told_figures(model: Any) -> dict[str, int]:
    """A server's figures of its model, from a reply to /v1/models or the fact `model` of a run."""
    meta = model.get("meta") if isinstance(model, dict) else None
    data = model.get("data") if isinstance(model, dict) else None
    if isinstance(data, list) and data and isinstance(data[0], dict):
        meta = data[0].get("meta")
    if not isinstance(meta, dict):
        return {}
    return {name: meta[name] for name in _FIGURES if isinstance(meta.get(name), int)}


def figures_of(file: GgufFile) -> dict[str, int]:
    """The figures of a file, under the server's names."""
    architecture, tensors = file.architecture, file.tensors.values()
    return {
        "n_vocab": len(file.strs("tokenizer.ggml.tokens", [])),
        "n_ctx_train": file.int_(f"{architecture}.context_length", 0),
        "n_embd": file.int_(f"{architecture}.embedding_length", 0),
        "n_params": sum(math.prod(tensor.shape) for tensor in tensors),
        "size": sum(tensor.n_bytes for tensor in tensors),
    }


def by_figures(theirs: Mapping[str, int], file: GgufFile) -> Identity:
    """DIFFERENT if any figure differs."""
    mine = figures_of(file)
    for name, about in _FIGURES.items():
        if name in theirs and theirs[name] != mine[name]:
            reason = f"It has {theirs[name]:,} {about}, {file.path.name} has {mine[name]:,}."
            # the bytes of tensors come last: parameters alone may be equal in other types
            return Identity(DIFFERENT, reason, name == "size" and "n_params" in theirs)
    if not theirs:
        return Identity(UNKNOWN, "Nothing is known about the server's model.")
    return Identity(UNKNOWN, "The server's model has the same figures as this file.")


# -- 3 and 4: what the server computes -----------------------------------------------------


def by_tokens(ask: Ask, text: str, tokenizer: Tokenizer) -> Identity:
    """DIFFERENT if the server tokenizes a text differently."""
    body = {"content": text, "add_special": False, "parse_special": True}
    reply = ask("/tokenize", body)
    theirs = reply.get("tokens") if isinstance(reply, dict) else None
    if isinstance(theirs, list) and theirs != tokenizer.encode(text):
        return Identity(DIFFERENT, "The server tokenises the text differently.")
    return Identity(UNKNOWN, "The server tokenises the text in the same way.")


def by_probe(ask: Ask, tokens: Sequence[int], session: Session) -> Identity:
    """Compare the probabilities after three prefixes of the tokens, in an idle slot."""
    if not tokens:
        return Identity(UNKNOWN, "There is no text to probe with.")
    slot = _idle_slot(ask)
    if slot is None:
        return Identity(UNKNOWN, "The server has no idle slot to probe with.")
    logits = session.logits(tokens).astype(np.float64)
    for n in sorted({max(1, len(tokens) * part // 3) for part in (1, 2, 3)}):
        body = {
            "prompt": list(tokens[:n]),
            "n_predict": 1,
            "n_probs": _N_PROBS,
            "temperature": 0,
            "cache_prompt": False,
            "id_slot": slot,
        }
        theirs = _probabilities(ask("/completion", body))
        if not theirs:
            return Identity(UNKNOWN, "The server does not report probabilities.")
        mine = softmax(logits[n - 1])
        largest = max(abs(p - float(mine[i])) if i < len(mine) else 1.0 for i, p in theirs.items())
        best, ours = max(theirs, key=theirs.__getitem__), int(mine.argmax())
        differs = best != ours and float(mine[ours] - mine[min(best, len(mine) - 1)]) >= _TIE_P
        if differs or largest > _MOST_DP:
            return Identity(
                DIFFERENT,
                f"After {n} tokens, a probability of the server differs by {largest:.2g}.",
            )
    return Identity(LIKELY, "The server's probabilities are those of this file.")


def _idle_slot(ask: Ask) -> int | None:
    slots = ask("/slots", None)
    for slot in slots if isinstance(slots, list) else ():
        if isinstance(slot, dict) and slot.get("is_processing") is False:
            number = slot.get("id")
            return number if isinstance(number, int) else None
    return None


def _probabilities(reply: Any) -> dict[int, float]:
    """Probabilities of a reply's first token, by token id."""
    rows = reply.get("completion_probabilities") if isinstance(reply, dict) else None
    first = rows[0] if isinstance(rows, list) and rows else None
    tops = first.get("top_logprobs") if isinstance(first, dict) else None
    found = {}
    for top in tops if isinstance(tops, list) else ():
        if isinstance(top, dict) and isinstance(top.get("id"), int):
            log_p = top.get("logprob")
            if isinstance(log_p, int | float) and log_p <= 0 and top["id"] >= 0:
                found[top["id"]] = math.exp(log_p)
    return found


# -- 5: the text ---------------------------------------------------------------------------


def by_text(shorts: Sequence[float]) -> Identity:
    """The verdict of re-scored tokens. shorts: by how much each one misses being the sampler's
    choice, 0 if noise explains it. A text mostly by another model differs from one that speculation
    has changed in a few places; in between the two look alike."""
    n = len(shorts)
    if not n:
        return Identity(UNKNOWN, "None of its tokens can be checked.")
    n_right = sum(short <= 0 for short in shorts)
    if n_right >= _LEAST_SHARE * n and all(short <= _HALF for short in shorts):
        return Identity(LIKELY, f"{n_right} of {n} tokens are this model's choice.")
    if 2 * n_right < n and n >= _FEW:
        return Identity(DIFFERENT, f"Only {n_right} of {n} tokens are this model's choice.")
    return Identity(
        UNKNOWN,
        f"{n_right} of {n} tokens are this model's choice: the others are of another model, or "
        "wrong because of speculation.",
    )
