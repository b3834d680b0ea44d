"""How each kind of layer is shown: a letter, a colour and a name."""

from __future__ import annotations

from typing import NamedTuple


class LayerKind(NamedTuple):
    """letter: in the map of layers. role: of its colour in a theme, without `layer.`."""

    letter: str
    role: str
    name: str


LAYER_KINDS = {
    "delta net": LayerKind("G", "delta_net", "Gated DeltaNet"),
    "kda": LayerKind("K", "kda", "Kimi Delta Attention"),
    "mamba-2": LayerKind("S", "mamba", "Mamba-2"),
    "short convolution": LayerKind("C", "convolution", "short convolution"),
    "attention": LayerKind("A", "attention", "attention"),
    "sparse attention": LayerKind("B", "attention", "block-sparse attention"),
    "latent attention": LayerKind("L", "latent", "latent attention (MLA)"),
    "attention + mamba-2": LayerKind("H", "side_by_side", "attention in parallel with Mamba-2"),
    "feed-forward": LayerKind("F", "feed_forward", "feed-forward only"),
    "mtp": LayerKind("M", "mtp", "MTP head"),
}
"""By the name that engine.model.parts gives a block, or `mtp`."""
