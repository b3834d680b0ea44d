"""Make the demo models: `python -m resources.demo.train`.

Everything comes from text that is on the machine anyway; the stages are resumed where they
stopped.  Checkpoints lie in `work/` beside this file.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path

import torch

from resources.demo.corpus import Corpus, newline_tokens, read_sources
from resources.demo.model import DRAFT, TARGET, DemoConfig, DemoModel
from resources.demo.stages import Plan, Stage, workers
from resources.demo.tokenizer import load_or_train

WORK = Path(__file__).resolve().parent / "work"
TARGET_PLAN = Plan("target", 1000, 0.02, 0.004, mtp_from=0.6, repair_from=0.8)
DRAFT_PLAN = Plan("draft", 700, 0.02, 0.005)


def _keep_freed_memory() -> None:
    # large tensors come and go every step; handing their pages back costs a quarter of the time
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass


def make_model(config: DemoConfig, seed: int, compiled: bool) -> DemoModel:
    """An untrained model; `compiled` needs a C++ compiler and is about 1.7 times as fast."""
    torch.manual_seed(seed)
    model = DemoModel(config)
    if compiled:
        for block in model.blk:
            block.compile(dynamic=False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=["target", "draft"])
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()
    _keep_freed_memory()
    began = time.monotonic()

    def log(text: str) -> None:
        print(f"{time.monotonic() - began:7.0f} s  {text}", flush=True)

    sources = read_sources()
    tokenizer = load_or_train(
        args.work / "tokenizer.json",
        (s.text for s in sources if s.group != "tests" and not s.held_out),
    )
    corpus = Corpus.build(sources, tokenizer)
    log(", ".join(f"{group} {len(s.ids)} tokens" for group, s in corpus.train.items()))
    newline = newline_tokens(tokenizer)
    config, plan = {"target": (TARGET, TARGET_PLAN), "draft": (DRAFT, DRAFT_PLAN)}[args.stage]
    if args.steps:
        from dataclasses import replace

        plan = replace(plan, n_steps=args.steps)
    model = make_model(config, args.seed, not args.eager)
    stage = Stage(model, corpus, newline, plan, args.work)
    stage.resume()
    with workers(args.threads) as threads:
        stage.run(threads, log)


if __name__ == "__main__":
    main()
