"""Taps: the rows that drafters read, held to golden features and to rows decoded one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.batch import Span
from engine.errors import UnsupportedModelError
from engine.machine.graphs import VARIABLE
from engine.memory.hybrid import HybridMemory
from engine.model.drafters.config import check_taps
from engine.model.layers import TargetRows, join_rows
from engine.model.parts.trunks import HyperConnections
from tests.support.golden_drafters import TARGETS, drafters, golden_drafter
from tests.support.golden_runs import session

LAYERS = {
    "eagle3-a-shared": (1, 2, 3),
    "eagle3-b-d2t-norms": (0, 2, 3),
    "eagle3-c-lastlayer": (1, 3, 4),
    "dflash-b-swa-d2t": (1, 3),
}


def decoded(name: str, tokens: list[int], widths: list[int], taps: tuple[int, ...]) -> TargetRows:
    """Rows of the tokens, decoded in passes of these widths."""
    model = session(name).model
    memory = HybridMemory.for_model(model.config, 1, 256, model.device)
    found, pos = [], 0
    for width in widths:
        part = tokens[pos : pos + width]
        (ubatch,) = memory.split([Span(0, pos, part, [])], max(widths), "seq")
        found.append(model.forward(ubatch, memory, taps=taps).rows[0])
        pos += len(part)
    return join_rows(found)


@pytest.mark.parametrize("name", [name for name in drafters("") if name in LAYERS])
@pytest.mark.parametrize("width", [1, 13, 256])
def test_features_are_those_of_the_golden_data(name, width):
    """One by one, so that passes are recorded; in chunks; in one pass."""
    golden, layers = golden_drafter(name), LAYERS[name]
    features = torch.from_numpy(golden["features"])
    n = len(features)
    tokens = golden["tokens"][:n].tolist()
    rows = decoded(TARGETS[name], tokens, [width] * -(-n // width), tuple(sorted(layers)))
    found = rows.side_by_side(layers).unflatten(1, (len(layers), -1))
    torch.testing.assert_close(found, features, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen35moe-d-v2x-mtp-f32", "qwen3next-e-v2x-f32"])
def test_recorded_passes_hand_over_the_same_bits(name, monkeypatch):
    tokens = [(11 * i + 3) % 384 for i in range(24)]
    taps = (0, 1, session(name).config.n_layer)
    recorded = decoded(name, tokens, [2] * 12, taps)
    monkeypatch.setenv(VARIABLE, "off")
    plain = decoded(name, tokens, [2] * 12, taps)
    assert list(recorded.taps) == list(taps)
    assert torch.equal(recorded.hidden, recorded.taps[taps[-1]])
    for layer in taps:
        assert torch.equal(recorded.taps[layer], plain.taps[layer])


def test_a_target_that_cannot_hand_rows_over_is_refused():
    config = session("qwen3-f-f32").config
    check_taps(config, [0, config.n_layer], "x.gguf")
    with pytest.raises(UnsupportedModelError, match=r"x\.gguf reads the input of layer 7, and "):
        check_taps(config, [0, 7], "x.gguf")
    streams = replace(config, trunk=HyperConnections(2, 4))
    with pytest.raises(UnsupportedModelError, match="several streams do"):
        check_taps(streams, [0], "x.gguf")
