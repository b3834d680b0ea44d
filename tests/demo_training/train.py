"""Make the demo models: `python -m tests.demo_training.train`.

Everything comes from text that is on the machine anyway, and from grammars (`texts`). The stages
follow one another and are resumed where they stopped; their checkpoints are in `work/` next to this
file, the finished pair as well, so that the shipped one is only replaced by hand.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from resources import DEMO_DRAFT, DEMO_TARGET
from tests.demo_training import export
from tests.demo_training.corpus import Corpus, generated, newline_tokens, read_sources
from tests.demo_training.model import DRAFT, TARGET, DemoConfig, DemoModel
from tests.demo_training.repair import cut_prompts, generate, whole_texts
from tests.demo_training.stages import TEXT_SHARES, WINDOW, Plan, Stage, workers
from tests.demo_training.tokenizer import from_file, load_or_train

WORK = Path(__file__).resolve().parent / "work"
TARGET_PLAN = Plan(
    "target",
    1800,
    0.02,
    0.004,
    decay_from=0.45,
    mtp_from=0.65,
    repair_from=0.8,
    large_from=0.75,
    repair_weight=1.0,
)
REPAIR_PLAN = Plan(
    "repair",
    400,
    0.005,
    0.001,
    decay_from=0.4,
    large_from=0.0,
    repair_from=0.0,
    n_repair=2,
    repair_weight=1.0,
    refresh=15,
)
# from here on four windows in five are stories and functions
TEXTS_PLAN = Plan(
    "texts", 1200, 0.012, 0.0025, decay_from=0.5, large_from=2.0, mtp_from=0.9, shares=TEXT_SHARES
)
# the MTP block and the draft have to guess the target's text, not their library's
MTP_PLAN = Plan(
    "mtp",
    50,
    0.004,
    0.001,
    decay_from=0.2,
    large_from=2.0,
    mtp_from=0.0,
    shares=TEXT_SHARES,
    own_text=0.5,
)
DRAFT_PLAN = Plan("draft", 1100, 0.02, 0.005)
DRAFT_TEXTS_PLAN = Plan(
    "draft-texts", 180, 0.012, 0.003, decay_from=0.3, large_from=2.0, shares=TEXT_SHARES
)
TUNE_PLAN = Plan(
    "draft-tuned",
    80,
    0.008,
    0.0015,
    decay_from=0.2,
    large_from=2.0,
    shares=TEXT_SHARES,
    own_text=0.5,
)
N_OWN_TEXTS = 384
OWN_TEXT = 192  # tokens after a prompt
STAGES = ("target", "repair", "texts", "mtp", "draft", "draft-texts", "draft-tuned", "export")


@dataclass(frozen=True, slots=True)
class Workshop:
    """What all stages share."""

    corpus: Corpus
    tokenizer: Tokenizer
    folder: Path
    seed: int
    compiled: bool
    from_shipped: bool
    threads: ThreadPoolExecutor
    log: Callable[[str], None]

    def model(self, config: DemoConfig) -> DemoModel:
        """An untrained model."""
        torch.manual_seed(self.seed)
        return self.prepared(DemoModel(config))

    def prepared(self, model: DemoModel) -> DemoModel:
        """Compiled if that is possible: it needs a C++ compiler and is 1.7 times as fast."""
        if self.compiled:
            for block in model.blk:
                block.compile(dynamic=False)
        return model

    def run(self, model: DemoModel, plan: Plan, own_text: Tensor | None = None) -> None:
        """Bring `model` to the end of `plan`, from the checkpoint if there is one."""
        stage = Stage(model, self.corpus, self.tokenizer, plan, self.folder, own_text)
        stage.resume()
        stage.run(self.threads, self.log)

    def begun(self, config: DemoConfig, shipped: Path, *plans: Plan) -> DemoModel:
        """A model as the shipped file has it, if that was asked for, or brought through `plans`."""
        model = self.model(config)
        if self.from_shipped:
            export.load(model, shipped)
            return model
        for plan in plans:
            self.run(model, plan)
        return model

    def own_text(self, model: DemoModel, n: int = N_OWN_TEXTS) -> Tensor:
        """Rows of n greedy texts of the target, [rows, WINDOW + 1], made once."""
        path = self.folder / "own-text.pt"
        if not path.exists():
            groups = (*["texts"] * 5, "library")
            newline = newline_tokens(self.tokenizer)
            prompts = cut_prompts(self.corpus, 1 << 20, n, groups, newline)
            parts = [part for rows in prompts for part in rows.split(64)]
            made = self.threads.map(lambda part: generate(model, part, OWN_TEXT), parts)
            rows = [row for batch in made for row in batch]
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed))
            torch.save(whole_texts([rows[i] for i in order.tolist()], WINDOW + 1), path)
        return torch.load(path, weights_only=True)


def make(shop: Workshop, stages: set[str]) -> None:
    """Run `stages`; what they build on is taken from its checkpoints, or made first."""
    behind_target = stages - {"draft", "draft-texts"}
    if behind_target:
        target = shop.begun(TARGET, DEMO_TARGET, *_asked(stages, TARGET_PLAN, REPAIR_PLAN))
    if behind_target - {"target", "repair"}:
        shop.run(target, TEXTS_PLAN)
    if "mtp" in stages:
        _freeze_trunk(target)
        shop.run(target, MTP_PLAN, shop.own_text(target))
    if stages & {"draft", "draft-texts", "draft-tuned", "export"}:
        draft = shop.begun(DRAFT, DEMO_DRAFT, DRAFT_PLAN)
    if stages & {"draft-texts", "draft-tuned", "export"}:
        shop.run(draft, DRAFT_TEXTS_PLAN)
    if "draft-tuned" in stages:
        shop.run(draft, TUNE_PLAN, shop.own_text(target))
    if "export" in stages:
        _export(shop, target, draft)


def _asked(stages: set[str], *plans: Plan) -> tuple[Plan, ...]:
    """The target's first plans: of both, only `target` if no stage builds on the second."""
    return plans[:1] if stages <= {"target", "draft", "draft-texts"} else plans


def _freeze_trunk(target: DemoModel) -> None:
    for name, parameter in target.named_parameters():
        parameter.requires_grad_(name.startswith(f"blk.{target.c.n_layer}."))


def _export(shop: Workshop, target: DemoModel, draft: DemoModel) -> None:
    export.save(target, shop.tokenizer, shop.folder / "demo-target.gguf")
    export.save(draft, shop.tokenizer, shop.folder / "demo-draft.gguf")


def has_compiler() -> bool:
    """True if torch.compile can build its C++."""
    return any(shutil.which(name) for name in ("g++", "clang++"))


def _keep_freed_memory() -> None:
    # large tensors come and go every step; giving their pages back and forth is slow
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", help=f"some of {', '.join(STAGES)}; default all")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--from-shipped", action="store_true", help="begin `texts` and `draft-texts` from the files"
    )
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--restart", action="store_true", help="forget the checkpoints")
    args = parser.parse_args()
    stages = set(args.stages or STAGES)
    if unknown := stages.difference(STAGES):
        parser.error(f"unknown stage {', '.join(sorted(unknown))}")
    _keep_freed_memory()
    args.work.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def log(text: str) -> None:
        print(f"{time.monotonic() - began:7.0f} s  {text}", flush=True)

    if args.restart:
        for path in args.work.glob("*.pt"):
            path.unlink()
    sources = read_sources() + generated()
    learned = (s.text for s in sources if s.group in ("library", "packages") and not s.held_out)
    tokenizer = (
        from_file(DEMO_TARGET)
        if args.from_shipped
        else load_or_train(args.work / "tokenizer.json", learned)
    )
    corpus = Corpus.build(sources, tokenizer)
    log(", ".join(f"{group} {len(s.ids)} tokens" for group, s in corpus.train.items()))
    with workers(args.threads) as threads:
        shop = Workshop(
            corpus,
            tokenizer,
            args.work,
            args.seed,
            has_compiler() and not args.eager,
            args.from_shipped,
            threads,
            log,
        )
        make(shop, stages)


if __name__ == "__main__":
    main()
