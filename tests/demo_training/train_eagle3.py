"""Make the demo target's EAGLE-3 drafter: `python -m tests.demo_training.train_eagle3`.

The target continues beginnings of the training text greedily, in the engine; the drafter learns
what the target says there, in chains as it will draft. Texts and checkpoints are in `work/` next to
this file; a stopped run goes on from them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.batch import Span
from engine.memory.hybrid import HybridMemory
from engine.session import Session
from kernels.linear.dequant import dequantise
from resources import DEMO_EAGLE3, DEMO_TARGET
from tests.demo_training.corpus import CorpusFile, read_sources
from tests.demo_training.eagle3 import TAPS, Eagle3Net, load, save
from tests.demo_training.model import product
from tests.demo_training.optimiser import Optimiser, decay
from tests.demo_training.stages import workers
from tests.demo_training.texts.generator import texts
from tests.demo_training.train import WORK

LENGTH = 160
ROWS = 5  # of one micro-batch
N_STEPS = 3
_WEIGHTS = (1.0, 0.8, 0.65)


class Texts:
    """Rows of token ids [n, LENGTH]: pieces of the training text, and the target's own.

    Four in five are beginnings of stories and functions, as in the target's training.
    """

    def __init__(self, session: Session, seed: int) -> None:
        self._session = session
        sources = [s for s in read_sources() if not s.held_out and s.group != "tests"]
        self._sources = [s for s in sources if len(s.text) > 4000]
        self._rng = np.random.default_rng(seed)
        self._generated = texts(seed)

    def piece(self, n: int) -> list[int]:
        """n tokens from the beginning of a generated text, or from a line start."""
        while True:
            if self._rng.random() < 0.8:
                return list(self._session.tokenizer.encode(next(self._generated))[:n])
            source: CorpusFile = self._sources[self._rng.integers(len(self._sources))]
            at = source.text.find("\n", int(self._rng.integers(len(source.text) - 2000))) + 1
            ids = self._session.tokenizer.encode(source.text[at : at + 8 * n], parse_special=False)
            if len(ids) >= n:
                return list(ids[:n])

    def pieces(self, n_rows: int, n: int) -> Tensor:
        """Rows of pieces, [n_rows, n]."""
        rows = [self.piece(n) for _ in range(n_rows)]
        return torch.tensor(rows, dtype=torch.int64).view(n_rows, n)

    def continued(self, n_rows: int) -> Tensor:
        """What the target makes of the beginnings of pieces, [n_rows, LENGTH]."""
        model, n_prompt = self._session.model, int(self._rng.choice([6, 12, 24, 48]))
        ids = self.pieces(n_rows, n_prompt)
        memory = HybridMemory.for_model(model.config, n_rows, LENGTH, model.device)
        start = 0
        while ids.shape[1] < LENGTH:
            new = ids[:, start:].tolist()
            spans = [Span(i, start, row, [len(row) - 1]) for i, row in enumerate(new)]
            (ubatch,) = memory.split(spans, n_rows * len(new[0]), "equal")
            start = ids.shape[1]
            best = model.forward(ubatch, memory).logits.argmax(-1)
            ids = torch.cat([ids, best[:, None]], 1)
        return ids


def rows_of(session: Session, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Tapped rows [B, L, 3 * n_embd] and hidden rows [B, L, n_embd] of the target."""
    model, (n_rows, n) = session.model, ids.shape
    memory = HybridMemory.for_model(model.config, n_rows, n, model.device)
    spans = [Span(i, 0, row, []) for i, row in enumerate(ids.tolist())]
    (ubatch,) = memory.split(spans, n_rows * n, "equal")
    rows = model.forward(ubatch, memory, taps=TAPS).rows
    # the engine's tensors are for inference
    return rows.side_by_side(TAPS).clone(), rows.hidden.clone()


def loss_of(net: Eagle3Net, table: Tensor, ids: Tensor, rows: Tensor, hidden: Tensor) -> Tensor:
    """Cross-entropy with what the target says, summed over the steps of a chain."""
    total, said = torch.zeros(()), torch.softmax(product(hidden, table), -1)
    for step, logits in enumerate(net.chain(rows, ids, N_STEPS)):
        n = logits.shape[1]
        wanted = said[:, 1 + step : 1 + step + n]
        part = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
        total = total + _WEIGHTS[step] * part
    return total


class Training:
    """The loop, with checkpoints."""

    def __init__(self, session: Session, folder: Path, n_steps: int, seed: int) -> None:
        self._session, self._folder, self.n_steps = session, folder, n_steps
        rows = session.model.embedding.rows
        data = rows.data if rows.type is None else None
        if data is None:
            n = session.config.n_vocab * session.config.n_embd
            data = dequantise(rows.data.flatten(), rows.type or "", n).view(
                -1, session.config.n_embd
            )
        self._table = data.clone().float()
        torch.manual_seed(seed)
        self.net = Eagle3Net(self._table)
        self._optimiser = Optimiser(self.net, 0.015, 0.003)
        self._texts, self._own = Texts(session, seed), torch.empty(0, LENGTH, dtype=torch.int64)
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        self.step = 0

    def make_texts(self, n: int) -> None:
        """Have n rows of the target's own text."""
        path = self._folder / "eagle3-text.pt"
        if path.exists():
            self._own = torch.load(path, weights_only=True)
        began = time.monotonic()
        while len(self._own) < n:
            self._own = torch.cat([self._own, self._texts.continued(32)])
            if len(self._own) % 256 == 0:
                print(f"{len(self._own)} texts, {time.monotonic() - began:.0f} s", flush=True)
                torch.save(self._own, path)

    def resume(self, from_shipped: bool) -> None:
        """Go on from the checkpoint if there is one, else from the shipped file if asked to."""
        path = self._folder / "eagle3.pt"
        if from_shipped:
            load(self.net, DEMO_EAGLE3)
        if path.exists():
            state = torch.load(path, weights_only=True)
            self.net.load_state_dict(state["net"])
            self._optimiser.load_state_dict(state["optimiser"])
            self.step = state["step"]

    def run(self, threads: ThreadPoolExecutor) -> None:
        """Train to the end."""
        parameters = list(self.net.parameters())
        saved = began = time.monotonic()
        first, losses = self.step, []
        while self.step < self.n_steps:
            jobs = [self._batch(2 * self.step + i) for i in range(2)]
            found = list(threads.map(lambda batch: self._gradients(batch, parameters), jobs))
            for i, parameter in enumerate(parameters):
                parameter.grad = torch.stack([gradients[i] for gradients, _ in found]).mean(0)
            self._optimiser.step(decay(self.step, self.n_steps, 0.3), threads)
            self.step += 1
            losses.append(sum(loss for _, loss in found) / len(found))
            if self.step % 20 == 0:
                rate = (self.step - first) / (time.monotonic() - began)
                print(
                    f"{self.step} loss {np.mean(losses[-20:]):.3f} {rate:.2f} steps/s", flush=True
                )
            if time.monotonic() - saved > 120 or self.step == self.n_steps:
                self._save()
                saved = time.monotonic()

    def _batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, and the target's rows as `rows_of` gives them."""
        chosen = np.random.default_rng(number).choice(len(self._own), ROWS, replace=False)
        for i in chosen.tolist():
            if i not in self._known:
                rows, hidden = rows_of(self._session, self._own[i : i + 1])
                self._known[i] = rows[0].bfloat16(), hidden[0].bfloat16()
        found = [self._known[i] for i in chosen.tolist()]
        rows, hidden = (torch.stack([pair[side] for pair in found]).float() for side in (0, 1))
        return self._own[chosen], rows, hidden

    def _gradients(
        self, batch: tuple[Tensor, Tensor, Tensor], parameters: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], float]:
        ids, rows, hidden = batch
        with torch.enable_grad():
            loss = loss_of(self.net, self._table, ids, rows, hidden)
            return torch.autograd.grad(loss, parameters), loss.item()

    def _save(self) -> None:
        state = {
            "net": self.net.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "step": self.step,
        }
        part = self._folder / "eagle3.part"
        torch.save(state, part)
        part.replace(self._folder / "eagle3.pt")
        save(self.net, DEMO_TARGET, self._folder / "demo-eagle3.gguf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the checkpoints")
    parser.add_argument("--texts", type=int, default=512, help="rows of the target's own text")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--from-shipped", action="store_true", help="begin from the shipped file")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    with workers(2) as threads:
        session = Session.open(DEMO_TARGET, compute="f32")
        training = Training(session, args.work, args.steps, args.seed)
        training.resume(args.from_shipped)
        training.make_texts(args.texts)
        training.run(threads)


if __name__ == "__main__":
    main()
