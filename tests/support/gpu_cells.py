"""The cells of the table of tests/bench/gpu_table.py: what a golden model must do on a device.

Each raises AssertionError with what was wrong. Tests marked `gpu` play the same cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle, product

import numpy as np

from engine.audit.run_audit import audit_of
from engine.compare.comparison import Comparison
from engine.options import (
    DRAFTERS,
    KV_MODES,
    ROLLBACK_POLICIES,
    SPLITS,
    CacheOptions,
    RunOptions,
    SamplerOptions,
)
from engine.session import Session
from tests.support.clean import PASSED
from tests.support.comparisons import finish, specs, verdicts
from tests.support.conversations import converse
from tests.support.faults import FAULTY_LANES
from tests.support.golden_drafters import TARGETS, there
from tests.support.golden_files import golden_file, second_set
from tests.support.golden_runs import (
    MODELS,
    SAMPLED,
    decode,
    golden,
    options_of,
    prompt_of,
    prompts_of,
    session,
    tokens_of,
)

GREEDY = SamplerOptions()
OTHER_MODES = ("bf16", "blocks", "auto")
LOOK_UPS = tuple(name for name, spec in DRAFTERS.items() if spec.needs is None)
LANES = (
    *ROLLBACK_POLICIES,
    *(f"{policy},{how}" for policy in ROLLBACK_POLICIES for how in ("free", "forks")),
    "planes,ubatch=3",
    "ring,split=seq,kv=unified",
    "planes,n_rs_seq=1",
    "checkpoint,checkpoint_device=device",
    "planes,compute=bf16",
)
TURNS = (
    ("say", 0.0, "def f(x):\n"),
    ("say", 0.0, " and so on"),
    ("edit", 0.6, "return x"),
    ("branch", 0.3, "1 2 3 4 "),
)
N = 10


def models() -> list[str]:
    """The golden models that are there, of every family."""
    there_are = [name for name in MODELS if golden_file(f"{name}.gguf").exists()]
    return [*there_are, *second_set()]


@dataclass(frozen=True)
class Row:
    """A golden model on a device."""

    name: str
    device: str

    def opened(self, draft: str | None = None, compute: str = "f32") -> Session:
        return session(self.name, draft, compute=compute, device=self.device)

    @property
    def drafter(self) -> str:
        """That of the model itself, or draft-simple by a model of another family."""
        return "draft-mtp" if self.opened().drafters else "draft-simple"

    def drafting(self) -> Session:
        other = MODELS[0] if self.name != MODELS[0] else MODELS[3]
        return self.opened(None if self.drafter == "draft-mtp" else other)

    def drafters(self) -> Iterator[tuple[str, Session]]:
        """All that can draft for this model, with what they are opened in."""
        for name in LOOK_UPS:
            yield name, self.opened()
        yield self.drafter, self.drafting()
        if self.drafter == "draft-simple":
            yield self.drafter, self.opened(self.name)
        for name, target in TARGETS.items():
            if target == self.name and there(name):
                kind = name.split("-")[0].replace("dflash2", "dflash")
                yield f"draft-{kind}", self.opened(name)


@cache
def _plain(row: Row, sampler: SamplerOptions) -> list[list[int]]:
    options = replace(options_of(N), sampler=sampler)
    return [tokens_of(decode(row.opened(), [one], options))[0] for one in prompts_of(row.name)]


def _same(row: Row, opened: Session, n: int, options: RunOptions, what: str) -> None:
    """The first n prompts, decoded together, have the tokens that each has alone."""
    options = replace(options, parallel=n)
    found = tokens_of(decode(opened, prompts_of(row.name)[:n], options))
    wanted = _plain(row, options.sampler)[:n]
    assert found == wanted, f"{what}: {found} instead of {wanted}"


def logits(row: Row) -> None:
    """Those of the golden file in f32."""
    arrays = golden(row.name)
    found = row.opened().logits(arrays["tokens"].tolist())[arrays["rows"]]
    wanted = arrays["logits_deq"] if "logits_deq" in arrays else arrays["logits"]
    worst = float(np.abs(found - wanted).max())
    assert worst <= 1e-3, f"a logit is {worst:.2e} off"


def modes(row: Row) -> None:
    """Other compute modes: near to f32, or no farther than twice what they are on the processor."""
    tokens = prompt_of(row.name).tokens
    exact = session(row.name).logits(tokens)

    def error(mode: str, device: str) -> float:
        found = session(row.name, compute=mode, device=device).logits(tokens)
        return float(np.square(found - exact).mean() / np.square(exact).mean())

    for mode in OTHER_MODES:
        far = error(mode, row.device)
        if far > 1e-2:
            near = error(mode, "cpu")
            assert far <= 2 * near, f"{mode}: error {far:.2e}, {near:.2e} on the processor"


def greedy(row: Row) -> None:
    """The 40 tokens of the golden file."""
    found = tokens_of(decode(row.opened(), [prompt_of(row.name)], options_of(40)))[0]
    wanted = golden(row.name)["greedy"].tolist()
    assert found == wanted, f"{found} instead of {wanted}"


def policy_with_drafters(row: Row, policy: str) -> None:
    """One policy under every drafter."""
    for drafter, opened in row.drafters():
        _same(row, opened, 1, options_of(N, drafter, n_max=4, rollback=policy), drafter)


def together(row: Row, n: int) -> None:
    """Sequences side by side under every split and KV mode, and every policy once."""
    ways = cycle(product(SPLITS, KV_MODES))
    for policy, (split, kv) in zip(ROLLBACK_POLICIES, ways, strict=False):
        options = options_of(N, row.drafter, rollback=policy, split=split, kv=kv)
        _same(row, row.drafting(), n, options, f"{policy}, split {split}, kv {kv}")


def temperature(row: Row) -> None:
    """Sampled, under every policy."""
    for policy in ROLLBACK_POLICIES:
        options = options_of(N, row.drafter, rollback=policy, sampler=SAMPLED)
        _same(row, row.drafting(), 2, options, policy)


def conversation(row: Row) -> None:
    """Turns, one edited and one branched off, that go on from what memory holds."""
    sizes = {"n_ctx": 512, "n_ubatch": 8, "n_batch": 16, "ignore_eos": True}
    options = options_of(5, row.drafter, rollback="ring", **sizes)
    converse(row.drafting(), options, TURNS, CacheOptions(ctx_checkpoints=3, checkpoint_min_step=5))


def compare(row: Row) -> None:
    """Lanes of every kind within the noise."""
    options = options_of(N, row.drafter, n_max=5, ignore_eos=True)
    lanes = finish(Comparison(row.drafting(), prompt_of(row.name), options, specs(*LANES)))
    found = {name: f"{one.verdict} {one.error}".strip() for name, one in verdicts(lanes).items()}
    right = (*PASSED, "reference", "mode", "forked")
    wrong = {name: verdict for name, verdict in found.items() if verdict not in right}
    assert not wrong, f"lanes {wrong}"


def audit(row: Row) -> None:
    """Drafted runs agree with plain passes over their text."""
    prompts = prompts_of(row.name)[:1]
    for policy in ROLLBACK_POLICIES:
        opened, options = row.drafting(), options_of(N, row.drafter, rollback=policy)
        run = opened.start(prompts, options, audit=audit_of(opened, prompts, options))
        while run.step():
            pass
        verdict = run.trace.runs[run.run_id]["audit"]["verdict"]
        assert verdict == "agrees", f"{policy}: the audit says {verdict}"


def faults(row: Row) -> None:
    """Every planted fault is seen, in each lane that has what it spoils."""
    if not row.opened().model.recurrent_layers:  # every rollback is exact, without a checkpoint
        lanes = tuple(lane for lane in FAULTY_LANES if "stale-logits" in lane)
    elif row.name.startswith("deepseek4"):  # rings go by position: one of a token more is as good
        lanes = tuple(lane for lane in FAULTY_LANES if "plane-off-by-one" not in lane)
    else:
        lanes = tuple(FAULTY_LANES)
    options, script = options_of(2 * N, n_max=5, ignore_eos=True), (0, 5, 2, 1)
    found = verdicts(
        finish(
            Comparison(
                row.opened(), prompt_of(row.name), options, specs(*lanes), draft_accept=script
            )
        )
    )
    unseen = [lane for lane in lanes if not found[lane].is_beyond]
    assert not unseen, f"not seen: {'; '.join(unseen)}"


CELLS: dict[str, Callable[[Row], None]] = {
    "logits": logits,
    "modes": modes,
    "greedy": greedy,
    **{policy: partial(policy_with_drafters, policy=policy) for policy in ROLLBACK_POLICIES},
    "two": partial(together, n=2),
    "five": partial(together, n=5),
    "sampled": temperature,
    "talk": conversation,
    "compare": compare,
    "audit": audit,
    "faults": faults,
}
