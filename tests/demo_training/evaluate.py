"""Measure the demo models: `python -m tests.demo_training.evaluate [TARGET DRAFT EAGLE3]`.

Prints, for 16 prompts continued greedily to the end of the text: acceptance of the drafters at
three drafted tokens, repeated 6-grams, whether a text ends by itself and whether it is right; and
the held-out loss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.options import RunOptions, SpecOptions
from engine.session import Session
from resources import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET, demo_prompts
from tests.demo_training.corpus import GROUPS, CorpusFile, generated, read_sources
from tests.demo_training.repair import marks
from tests.demo_training.texts.generator import FURTHER
from tests.demo_training.texts.reading import holds, is_story

N_TOKENS = 240  # the longest generated text has fewer
WINDOW = 384
N_TEXTS = 2500  # of which one in 25 is held out


def generate(session: Session, prompts: Sequence[str], drafter: str | None) -> tuple[Any, Any]:
    """Results and summary of a greedy run over all prompts, each to its end or N_TOKENS."""
    options = RunOptions(
        parallel=8,
        n_predict=N_TOKENS,
        spec=SpecOptions(types=(drafter,) if drafter else (), n_max=3),
    )
    run = session.start([session.prompt(text) for text in prompts], options)
    while run.step():
        pass
    return run.results(), run.summary()


def repeated(ids: Sequence[int], n_prompt: int) -> float:
    """Share of generated tokens that complete a 6-gram seen before in the sequence."""
    return sum(marks(ids, n_prompt)) / (len(ids) - n_prompt)


def held_out_loss(session: Session, sources: Sequence[CorpusFile], group: str) -> float:
    """Nats per token over the held-out files of `group`, in windows of WINDOW tokens."""
    total = 0.0
    count = 0
    for source in sources:
        if source.group != group or not source.held_out:
            continue
        ids = session.tokenizer.encode(source.text, parse_special=False)
        for start in range(0, len(ids) - 1, WINDOW):
            window = ids[start : start + WINDOW + 1]
            logits = torch.from_numpy(session.logits(window[:-1]))
            targets = torch.tensor(window[1:])
            total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            count += len(targets)
    return total / count if count else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, nargs="?", default=DEMO_TARGET)
    parser.add_argument("draft", type=Path, nargs="?", default=DEMO_DRAFT)
    parser.add_argument("eagle3", type=Path, nargs="?", default=DEMO_EAGLE3)
    parser.add_argument("--texts", action="store_true", help="print the continuations")
    parser.add_argument("--no-loss", action="store_true", help="leave the held-out loss out")
    args = parser.parse_args()
    torch.set_num_threads(1)  # models this small gain nothing from a second thread
    session = Session.open(args.target, [args.draft, args.eagle3], compute="f32")
    prompts = demo_prompts() + list(FURTHER)
    plain, _ = generate(session, prompts, None)
    report: dict[str, Any] = {}
    for drafter in ("draft-mtp", "draft-simple", "draft-eagle3"):
        results, summary = generate(session, prompts, drafter)
        report[drafter] = {
            "accepted": summary["draft_n_accepted"],
            "drafted": summary["draft_n"],
            "rate": round(summary["draft_acceptance_rate"], 3),
            "same text": all(a.tokens == b.tokens for a, b in zip(plain, results, strict=True)),
        }
    shares = [repeated(r.prompt_tokens + r.tokens, len(r.prompt_tokens)) for r in plain]
    report["repeated 6-grams"] = round(float(np.mean(shares)), 3)
    report["repeated 6-grams per prompt"] = [round(share, 2) for share in shares]
    whole = [text + r.text for text, r in zip(prompts, plain, strict=True)]
    report["tokens"] = [len(r.tokens) for r in plain]
    report["ends by itself"] = [r.stop == "end" for r in plain]
    report["right"] = [is_story(text) or holds(text) for text in whole]
    if not args.no_loss:
        sources = read_sources() + generated(N_TEXTS)
        for group in GROUPS:
            report[f"held-out loss, {group}"] = round(held_out_loss(session, sources, group), 3)
    print(json.dumps(report, indent=1))
    if args.texts:
        for text in whole:
            print("=" * 80, text, sep="\n")


if __name__ == "__main__":
    main()
