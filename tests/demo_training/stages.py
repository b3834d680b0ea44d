"""The training loop of the demo models: schedule, losses, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tests.demo_training.corpus import Corpus, layout_tokens, newline_tokens
from tests.demo_training.model import DemoModel
from tests.demo_training.optimiser import Optimiser, decay
from tests.demo_training.repair import NONE, Repaired, cut_prompts, generate_repaired, repair_loss

WINDOW = 384
ROWS = 4  # of one micro-batch; every micro-batch has this shape, so that one compilation serves
SHARES = {"library": 10, "packages": 5, "tests": 1}
TEXT_SHARES = {"texts": 15, "library": 1}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a stage does when; fractions are of its `n_steps`."""

    name: str
    n_steps: int
    muon_rate: float
    adam_rate: float
    decay_from: float = 0.5
    large_from: float = 0.8  # twice the micro-batches
    mtp_from: float = 2.0
    repair_from: float = 2.0
    n_micro: int = 2
    shares: dict[str, int] = field(default_factory=lambda: dict(SHARES))
    n_repair: int = 1  # micro-batches of a step that repair
    repair_weight: float = 0.5
    refresh: int = 25  # steps between generations
    own_text: float = 0.0  # share of micro-batches that are rows of the target's greedy text


@contextmanager
def workers(n_threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that each run whole micro-batches on one core.

    Two micro-batches side by side need one meeting per step; splitting every product over two
    cores needs thousands, and stalls when another process holds a core.
    """
    torch.set_num_threads(1)
    with ThreadPoolExecutor(n_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool


def language_loss(model: DemoModel, ids: Tensor, with_mtp: bool) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy of ids [B, T+1]; with 0.2 and 0.1 of the MTP losses on half the rows."""
    targets = ids[:, 1:]
    hidden, _ = model.trunk(ids[:, :-1])
    loss = nn.functional.cross_entropy(model.logits(hidden).flatten(0, 1), targets.flatten())
    report = {"loss": loss.item()}
    if with_mtp:
        half = ids.shape[0] // 2
        for key, weight in (("mtp", 0.2), ("mtp2", 0.1)):
            before = nn.functional.pad(hidden[:half, :-1], (0, 0, 1, 0))
            hidden, _ = model.mtp_step(ids[:half, :-1], before)
            drafted = model.logits(hidden).flatten(0, 1)
            part = nn.functional.cross_entropy(drafted, targets[:half].flatten())
            report[key] = part.item()
            loss = loss + weight * part
    return loss, report


@torch.no_grad()
def held_out_loss(model: DemoModel, documents: Sequence[np.ndarray], limit: int) -> float:
    """Mean nats per token over windows of at most WINDOW + 1, `limit` windows at most."""
    total = 0.0
    count = 0
    windows = [d[i : i + WINDOW + 1] for d in documents for i in range(0, len(d) - 1, WINDOW)]
    for window in windows[:: max(1, len(windows) // limit)]:
        ids = torch.from_numpy(window)[None]
        hidden, _ = model.trunk(ids[:, :-1])
        logits = model.logits(hidden)[0]
        total += nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return total / max(count, 1)


class Stage:
    """One resumable training run of one model."""

    def __init__(
        self,
        model: DemoModel,
        corpus: Corpus,
        tokenizer: Tokenizer,
        plan: Plan,
        folder: Path,
        own_text: Tensor | None = None,
    ) -> None:
        self.model = model
        self.corpus = corpus
        self.newline = newline_tokens(tokenizer)
        self.layout = layout_tokens(tokenizer)
        self.plan = plan
        self.path = folder / f"{plan.name}.pt"
        self.own_text = own_text
        self.optimiser = Optimiser(model, plan.muon_rate, plan.adam_rate)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.pool: Repaired | None = None
        self.step = 0

    def save(self) -> None:
        """Write the checkpoint; a broken write leaves the one before."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "pool": self.pool and (self.pool.ids, self.pool.avoided, self.pool.better),
        }
        part = self.path.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.path)

    def resume(self) -> None:
        """Continue from the checkpoint if there is one."""
        if self.path.exists():
            state = torch.load(self.path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.step = state["step"]
            self.pool = state["pool"] and Repaired(*state["pool"])

    def run(self, threads: ThreadPoolExecutor, log: Callable[[str], None]) -> None:
        """Train to the end of the plan."""
        saved = started = time.monotonic()
        n_tokens = 0
        while self.step < self.plan.n_steps:
            report, n = self._one_step(threads)
            n_tokens += n
            if self.step % 20 == 0 or self.step == self.plan.n_steps:
                seconds = time.monotonic() - started
                text = " ".join(f"{k} {v:.3f}" for k, v in report.items())
                log(f"{self.plan.name} {self.step} {text} {n_tokens / seconds:.0f} tokens/s")
            if time.monotonic() - saved > 180:
                group = next(iter(self.plan.shares))
                held = held_out_loss(self.model, self.corpus.held_out[group], 20)
                log(f"{self.plan.name} {self.step} held out, {group} {held:.3f}")
                self.save()
                saved = time.monotonic()
        self.save()

    def _one_step(self, threads: ThreadPoolExecutor) -> tuple[dict[str, float], int]:
        plan = self.plan
        done = self.step / plan.n_steps
        n_micro = plan.n_micro * (2 if done >= plan.large_from else 1)
        jobs: list[Callable[[], tuple[Tensor, dict[str, float]]]] = []
        if done >= plan.repair_from:
            self._refresh(threads)
            jobs.extend(self._repair_job(i) for i in range(plan.n_repair))
        while len(jobs) < n_micro:
            jobs.append(self._language_job(len(jobs), n_micro, done >= plan.mtp_from))
        results = list(threads.map(self._gradients, jobs))
        for i, parameter in enumerate(self.parameters):
            parts = [gradients[i] for gradients, _ in results if gradients[i] is not None]
            if parts:
                parameter.grad = torch.stack(parts).sum(0) / n_micro
        self.optimiser.step(decay(self.step, plan.n_steps, plan.decay_from), threads)
        self.step += 1
        keys = sorted({key for _, report in results for key in report})
        mean = {k: float(np.mean([r[k] for _, r in results if k in r])) for k in keys}
        return mean, n_micro * ROWS * WINDOW

    def _gradients(
        self, job: Callable[[], tuple[Tensor, dict[str, float]]]
    ) -> tuple[tuple[Tensor, ...], dict[str, float]]:
        loss, report = job()
        return torch.autograd.grad(loss, self.parameters, allow_unused=True), report

    def _language_job(
        self, micro: int, n_micro: int, with_mtp: bool
    ) -> Callable[[], tuple[Tensor, dict[str, float]]]:
        number = self.step * 2 * self.plan.n_micro + micro
        if self.own_text is not None and (micro + 0.5) / n_micro < self.plan.own_text:
            rng = np.random.default_rng(number)
            chosen = rng.choice(len(self.own_text), ROWS, replace=False)
            ids = self.own_text[torch.from_numpy(chosen)]
        else:
            rows = self.corpus.batch(number, self.plan.shares, ROWS, WINDOW + 1)
            ids = torch.from_numpy(rows)
        return lambda: language_loss(self.model, ids, with_mtp)

    def _refresh(self, threads: ThreadPoolExecutor) -> None:
        """New continuations to repair, every `refresh` steps."""
        if self.pool is not None and self.step % self.plan.refresh:
            return
        prompts = cut_prompts(self.corpus, self.step, 48, ("library", "packages"), self.newline)
        parts = threads.map(
            lambda p: generate_repaired(
                self.model,
                p,
                WINDOW + 1 - p.shape[1],
                self.layout,
                np.random.default_rng((self.step, p.shape[1])),
            ),
            prompts,
        )
        made = list(parts)
        self.pool = Repaired(
            torch.cat([p.ids for p in made]),
            torch.cat([p.avoided for p in made]),
            torch.cat([p.better for p in made]),
        )

    def _repair_job(self, micro: int) -> Callable[[], tuple[Tensor, dict[str, float]]]:
        assert self.pool is not None
        rng = np.random.default_rng(self.step * self.plan.n_repair + micro)
        chosen = torch.from_numpy(rng.choice(len(self.pool.ids), ROWS, replace=False))
        pool = self.pool
        ids, avoided, better = pool.ids[chosen], pool.avoided[chosen], pool.better[chosen]

        def job() -> tuple[Tensor, dict[str, float]]:
            hidden, _ = self.model.trunk(ids[:, :-1])
            logits = self.model.logits(hidden).flatten(0, 1)
            loss = repair_loss(logits, better[:, 1:].flatten(), avoided[:, 1:].flatten())
            share = (avoided != NONE).float().mean().item()
            return self.plan.repair_weight * loss, {"repair": loss.item(), "avoided": share}

        return job
