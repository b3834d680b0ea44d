"""Feed-forward parts: sizes and tensors."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from engine.model.parts import Shapes, only_present

Gating = tuple[str, tuple[float, ...]]
"""A replacement of plain SwiGLU, an operation of kernels.pointwise and its constants: situ: beta
and linear_beta; swiglu, clamped_swiglu: a limit for the factors, applied to the gate after silu or
before it; geglu: GELU instead of SiLU, not for experts."""


@dataclass(frozen=True, slots=True)
class DensePart:
    """down(silu(gate x) * up x) of this width, each product plus a bias where the file has one.

    joint: gate and up are one tensor, named after up. activation: "relu2" for down(max(up x, 0)^2),
    which has no gate.
    """

    width: int
    gating: Gating | None = None
    joint: bool = False
    activation: str = "swiglu"

    def opening(self, suffix: str = "") -> dict[str, int]:
        """Rows of the input matrices, by name."""
        if self.joint:
            return {f"ffn_up{suffix}": 2 * self.width}
        names = ("up",) if self.activation == "relu2" else ("gate", "up")
        return {f"ffn_{name}{suffix}": self.width for name in names}

    def shapes(self, n_embd: int, present: Container[str], suffix: str = "") -> Shapes:
        """See engine.model.parts.FeedForwardPart. suffix: of the tensors' names."""
        rows = {**self.opening(suffix), f"ffn_down{suffix}": n_embd}
        return _matrices(rows, n_embd, self.width, present)


def _matrices(rows: dict[str, int], n_embd: int, width: int, present: Container[str]) -> Shapes:
    """Matrices by their numbers of rows, and their biases; "ffn_down" has `width` columns."""
    return {
        **{
            f"{name}.weight": (n, width if name.startswith("ffn_down") else n_embd)
            for name, n in rows.items()
        },
        **only_present({f"{name}.bias": (n,) for name, n in rows.items()}, present),
    }


@dataclass(frozen=True, slots=True)
class RouterPart:
    """How experts are selected (kernels.moe.Choice).

    biased: the file has a bias for the selection. by_token: size of the vocabulary if each token
    has its experts in a table, which are not selected by scores; else 0.
    """

    scores: str = "sigmoid"
    biased: bool = True
    normalised: bool = True
    scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1
    by_token: int = 0


SOFTMAX = RouterPart("softmax", biased=False)
"""By the softmax of all experts, renormalised."""


@dataclass(frozen=True, slots=True)
class LatentPart:
    """Routed experts that work on rows of another width: projected down before them and up after
    them; their sum may be normed in between. down, up, norm: names of the tensors."""

    width: int
    down: str
    up: str
    norm: str | None = None


@dataclass(frozen=True, slots=True)
class MixturePart:
    """Mixture of experts; n_ff is their width.

    n_ff_shared: width of a shared expert, 0 for none; shared_gate: whether it has a gate of its
    own. activation: "swiglu" or "relu2", of all experts. gating, shared_gating: replacements of
    plain SwiGLU in the routed experts and in the shared one.
    """

    n_experts: int
    n_used: int
    n_ff: int
    n_ff_shared: int
    shared_gate: bool = True
    router: RouterPart = SOFTMAX
    activation: str = "swiglu"
    latent: LatentPart | None = None
    gating: Gating | None = None
    shared_gating: Gating | None = None

    @property
    def shared(self) -> DensePart | None:
        """The shared expert, which is always active."""
        if not self.n_ff_shared:
            return None
        return DensePart(self.n_ff_shared, self.shared_gating, activation=self.activation)

    def shapes(self, n_embd: int, present: Container[str]) -> Shapes:
        n, width = self.n_experts, self.n_ff
        d = self.latent.width if self.latent else n_embd
        shapes: Shapes = {"ffn_gate_inp.weight": (n, n_embd)}
        if self.activation == "relu2":
            shapes["ffn_up_exps.weight"] = (n, width, d)
        elif "ffn_gate_up_exps.weight" in present:
            shapes["ffn_gate_up_exps.weight"] = (n, 2 * width, d)
        else:
            shapes |= dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), (n, width, d))
        shapes["ffn_down_exps.weight"] = (n, d, width)
        if self.router.biased:
            shapes["exp_probs_b.bias"] = (n,)
        if self.router.by_token:
            shapes["ffn_gate_tid2eid.weight"] = (self.router.by_token, self.n_used)
        if self.latent:
            shapes[self.latent.down] = (d, n_embd)
            shapes[self.latent.up] = (n_embd, d)
            if self.latent.norm:
                shapes[self.latent.norm] = (d,)
        if self.shared:
            shapes |= self.shared.shapes(n_embd, present, "_shexp")
            if self.shared_gate:
                shapes["ffn_gate_inp_shexp.weight"] = (1, n_embd)
        return shapes
