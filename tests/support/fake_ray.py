"""The part of Ray that a sweep uses, within this process: nodes, one actor each, calls that end
one after another or never."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


@dataclass(eq=False)
class Call:
    """A call of an actor's method, run when it is looked at."""

    node_id: str
    act: Any
    error: Exception | None = None


@dataclass
class FakeRay:
    """nodes: identity of each by its number of processors. deaths: how many of the coming calls on
    a node end its actor. options: what the actor of each node was declared with. busiest: most
    calls that waited on one node at a time. closed: nodes whose actor was."""

    cpus: dict[str, float]
    deaths: dict[str, int] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    busiest: int = 0
    closed: list[str] = field(default_factory=list)
    is_connected: bool = False
    exceptions = SimpleNamespace(RayError=RayError, RayActorError=RayActorError)
    util = SimpleNamespace(
        scheduling_strategies=SimpleNamespace(
            NodeAffinitySchedulingStrategy=lambda node_id, soft: (node_id, soft)
        )
    )

    def init(self, address: str, **_: Any) -> None:
        if address == "nowhere":
            raise ConnectionError("no one\nanswers")
        self.is_connected = True

    def shutdown(self) -> None:
        self.is_connected = False

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node_id, "Alive": True, "Resources": {"CPU": n} if n else {}}
            for node_id, n in self.cpus.items()
        ]

    def remote(self, kind: type) -> Any:
        def options(**declared: Any) -> Any:
            node_id, _ = declared["scheduling_strategy"]
            self.options[node_id] = declared
            return SimpleNamespace(remote=lambda: self._actor(kind(), node_id))

        return SimpleNamespace(options=options)

    def _actor(self, made: Any, node_id: str) -> Any:
        def remote(*args: Any) -> Call:
            if self.deaths.get(node_id, 0) > 0:
                self.deaths[node_id] -= 1
                return Call(node_id, None, RayActorError("The actor died\nof something"))
            return Call(node_id, lambda: made.run(*args))

        def close() -> Call:
            self.closed.append(node_id)
            return Call(node_id, None)

        return SimpleNamespace(
            run=SimpleNamespace(remote=remote), close=SimpleNamespace(remote=close)
        )

    def wait(
        self, calls: list[Call], num_returns: int = 1, timeout: float = 0
    ) -> tuple[list[Call], list[Call]]:
        on_nodes = [call.node_id for call in calls]
        self.busiest = max(self.busiest, *(on_nodes.count(node_id) for node_id in on_nodes))
        return calls[-1:], calls[:-1]

    def get(self, call: Call) -> Any:
        if call.error:
            raise call.error
        return call.act()
