"""An observed server's requests and replies as a run of a trace.

Live clients, the proxy and capture files all write through here: bytes go in as they arrived, rows
of rounds come out once they are settled. What a server does not report stays empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from engine.analysis.acceptance.accept_rules import AcceptRule, rule_of, rule_said
from engine.observe.rounds.answer import PlainReader, RequestRun
from engine.observe.rounds.counters import (
    ACCEPTED,
    DRAFTED,
    PREDICTED,
    PROMPT,
    Movement,
    counted,
    differences,
    movement,
    read_counters,
)
from engine.observe.rounds.kept_requests import RawStore, model_of, server_of
from engine.observe.rounds.log_prompts import note_prompts
from engine.observe.rounds.log_reader import LogReader
from engine.observe.rounds.observed_request import ObservedRequest
from engine.observe.rounds.stream import UnreadableError, read_json
from engine.observe.rounds.trace_rows import COLUMNS, told_figures, with_others
from engine.observe.rounds.withheld_tokens import PlaneReach
from engine.trace.facts import SourceFacts
from engine.trace.store import TraceStore
from engine.trace.writer import TraceWriter

if TYPE_CHECKING:
    from engine.gguf.tokenizer import Tokenizer

Attachment = Literal["ask", "proxy", "log", "light-log", "record"]
"""How a server was observed."""

LLAMA_SERVER = "llama-server"
OTHER_ENGINES = {"vllm", "sglang", "tensorrt-llm", "ollama", "lm-studio", "llama-swap", "openai"}
"""Engines of servers other than llama-server; openai is one that does not identify itself."""
_PATIENCE_MS = 2000.0
"""Time that a settled row waits for others that may have ended earlier, ms."""
_MOST_NAMED = 16


@dataclass(frozen=True)
class ServerFacts:
    """What is known of a server before the first request. props, models: its replies to /props and
    /v1/models, empty if it gave none; with several models, for the one in use. model: its name, if
    requests must name it. about: a sentence on how it was chosen. end_token: its id and bytes, as
    far as known. No keys, no request headers."""

    address: str
    engine: str = LLAMA_SERVER
    props: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    about: str = ""
    end_token: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def is_llama_server(self) -> bool:
        """Whether it has llama-server's endpoints."""
        return self.engine == LLAMA_SERVER


class ObservedRun(RequestRun):
    """An observed run, from the first request until it is closed. Written by one thread."""

    def __init__(
        self,
        store: TraceStore,
        attachment: Attachment,
        server: ServerFacts,
        *,
        patience_ms: float = _PATIENCE_MS,
        known: ObservedRun | None = None,
        keep_raw: bool = True,
        vocabulary: Tokenizer | None = None,
        plain: PlainReader | None = None,
        **facts: Any,
    ) -> None:
        """Start a run. facts: JSON-able, anything else known about it.

        patience_ms: how long a row may wait for others that ended earlier; rows are numbered by the
        end of their rounds. known: another run of the same server, which gives the depth of its
        planes. keep_raw: keep sent and received data, for `capture`. vocabulary: of the model, for
        missing ids. plain: reads replies of other engines.
        """
        build = server.props.get("build_info")
        version = build if isinstance(build, str) else ""
        of_tokens = COLUMNS["tokens"] | ({"token_id": "derived"} if vocabulary is not None else {})
        self.server, self._server = server, server_of(server.address, server.props)
        writer = TraceWriter.begin(
            store,
            SourceFacts(server.engine, version),
            {
                "attachment": attachment,
                "server": self._server,
                "model": model_of(server.props, server.models, server.model),
                "requests": [],
                "observed_findings": [],
            }
            | facts,
            columns=COLUMNS | {"tokens": of_tokens},
        )
        super().__init__(
            writer,
            known.reach if known is not None else PlaneReach(),
            RawStore() if keep_raw else None,
            plain,
            vocabulary,
            patience_ms,
        )
        self.run_id = writer.run_id
        writer.learn(server.end_token, server.end_token.__getitem__)
        self.requests: list[ObservedRequest] = []
        """So far, in order of sending."""
        self._moved: Movement | None = None
        self._rows.drafters = known.drafters if known is not None else []
        said = rule_said(json.dumps(facts, default=str))  # the server's arguments in a capture
        self._learn_rule(said or (known.rule if known is not None else None))

    @property
    def rule(self) -> AcceptRule | None:
        """How the server accepts drafted tokens, None if unknown."""
        return rule_of(self._writer.facts)

    @property
    def drafters(self) -> list[str]:
        """The server's drafters, as far as known."""
        return self._rows.drafters

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return self._writer.ended

    def request(
        self,
        path: str,
        body: bytes | Mapping[str, Any],
        at_ms: float,
        *,
        streamed_by_us: bool = True,
    ) -> ObservedRequest:
        """Add a request. body: its JSON. streamed_by_us: whether per-token timings were requested
        on behalf of a client that did not ask for them."""
        if isinstance(body, bytes):
            try:
                body = read_json(body)
            except UnreadableError:
                body = {}
        body = body if isinstance(body, Mapping) else {}
        found = ObservedRequest(self, len(self.requests), path, body, at_ms)
        if streamed_by_us and "timings_per_token" not in body:
            found.learn(timings_added=True)
        self.requests.append(found)
        return found

    def log(self, text: str) -> None:
        """Add lines of the server's log, cut anywhere. From the first call on, rows wait for their
        log entries. Raises TraceFileError for an unreadable log."""
        reader = self.listen_to_log()
        if self.raw is not None:
            self.raw.add_log(text)
        reader.feed(text)
        self._learn_from_log(reader)

    def log_ended(self) -> None:
        """The log is complete, including its last line."""
        if self._log is not None:
            self._log.end()
            self._learn_from_log(self._log)

    def listen_to_log(self) -> LogReader:
        """From now on, rows wait for their entries in the server's log."""
        if self._log is None:
            self._log = LogReader()
        return self._log

    def _learn_from_log(self, reader: LogReader) -> None:
        server = reader.server
        if server.n_rs_seq is not None:
            self.reach.tell(server.n_rs_seq)
        if server.drafters:
            self._rows.drafters = server.drafters
        self._rows.log_pieces = server.pieces
        if server.launch:
            self._writer.set_facts(server=self._server | {"launch": server.launch})
        if server.is_synthetic:
            self._writer.set_facts(synthetic=True)
        self._learn_rule(server.rule)
        for answer in self._current:
            answer.join_log()

    def _learn_rule(self, rule: AcceptRule | None) -> None:
        if rule is not None:
            self._rows.rule = rule
            self._writer.set_facts(accept_rule=rule.text)

    def counters(self, before: str, after: str) -> None:
        """Compare with replies of /metrics before and after, all requests being over; a difference
        becomes a finding. Raises ValueError for invalid text."""
        if self.raw is not None:
            self.raw.metrics = before, after
        for answer in self._answers:
            answer.give_up_log()
        self.release(math.inf)
        moved = movement(read_counters(before), read_counters(after))
        if self._answers and all(answer.told is None for answer in self._answers):
            self._moved = moved  # for replies without speculation data
            return
        if not all(one.is_last and one.told is not None for one in self._answers):
            return  # even sums are unknown for some requests
        if all(one.has_rows for one in self._answers):
            counts = counted(self._writer.store, self.run_id)
            if len(self._answers) > len(self.requests):
                del counts[PROMPT]  # several answers to one prompt, each of which counts it
        else:
            told = [one.told for one in self._answers if one.told is not None]
            counts = {
                DRAFTED: sum(one.draft_n for one in told),
                ACCEPTED: sum(one.draft_n_accepted for one in told),
                PREDICTED: sum(one.predicted_n for one in told),
            }
        if found := differences(moved, counts):
            self.find(
                "counters-differ",
                "The server's totals differ from those of its replies.",
                "; ".join(found),
            )

    def end(self, error: str | None = None) -> None:
        """End the run: settle what is open."""
        if self.ended:
            return
        for request in self.requests:
            if not request.is_over:
                request.broke(error or "The run ended before the reply was complete.", math.inf)
        for answer in self._answers:
            answer.give_up_log()
        self.release(math.inf)
        if self._log is not None:
            self._writer.facts.add_to("observed_findings", *self._log.unread)
        note_prompts(self._writer.facts, ((one.seq_id, one.logged_prompt) for one in self._answers))
        if self._writer.facts.model is None:
            named = (answer.known.get("model") for answer in self._answers)
            if names := list(dict.fromkeys(filter(None, named))):
                self._writer.set_facts(model={"name": ", ".join(names[:_MOST_NAMED]), "meta": {}})
        stops = [answer.stop or "stopped" for answer in self._answers]
        told = [one.told for one in self._answers if one.told is not None]
        if told:
            has_rows = [one.has_rows for one in self._answers if one.told is not None]
            records = [one.record for one in self._answers if one.told is None]
            others = [one.figures() for one in records if one is not None]
            sums = told_figures(told, any(has_rows), all(has_rows))
            self._writer.set_facts(told=with_others(sums, others))
        elif self.plain is not None and self._answers:
            plain = [one.record for one in self._answers if one.record is not None]
            if len(plain) == len(self._answers):
                self._writer.set_facts(told=self.plain.figures(plain, self._moved))
        self._rows.fill_in()
        if self._rows.n_merged:
            self._writer.set_facts(merged_rows=self._rows.n_merged)
        if error is not None:
            self._writer.facts.setdefault("error", error)
        self._writer.end(stops)
