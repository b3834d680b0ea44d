"""The drafters that files of random weights can be written for, each for a model of such a file.

All lack embedding and head, which are the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.experiments.random_models.random_file import (
    CONTROL_TOKENS,
    Keys,
    RandomFile,
    heads,
    ints,
    sizes,
    streams,
)
from engine.model.config import ModelConfig
from engine.model.drafters.dflash_config import ARCHITECTURE as DFLASH
from engine.model.drafters.dflash_config import MARKOV, SELECTOR, read_dflash
from engine.model.drafters.eagle3_config import ARCHITECTURE as EAGLE3
from engine.model.drafters.eagle3_config import read_eagle3
from engine.model.parts import Shapes

_N_TAPS = 5
_MASK = "tokenizer.ggml.mask_token_id"
_N_STREAM_LAYERS = 3
_LARGE = 1024
"""Narrower targets are small enough for tests."""
_OF_MODELS = (
    "attention.compress_rope",
    "attention.indexer",
    "embedding_length_out",
    "hash_layer_count",
    "nextn_predict_layers",
    "vocab_size",
)
"""Keys of a deepseek4 model that its drafter's layers have no use for."""


def _eagle3(target: RandomFile) -> RandomFile:
    """As wide as the target."""
    config = target.config()
    n_embd, middle = config.n_embd, config.n_layer // 2
    keys = {
        **_layers(config, 1),
        "target_layers": ints((min(2, middle), middle, max(middle, config.n_layer - 3))),
        "target_hidden_size": n_embd,
    }
    return RandomFile(EAGLE3, keys, {})


def _layers(config: ModelConfig, n_layer: int) -> Keys:
    """Plain layers for a target, of which a control token is the mask."""
    width = 128 if config.n_embd >= _LARGE else 64
    n_head = config.n_embd // width
    return {
        **sizes(n_layer, config.n_embd),
        "feed_forward_length": 3 * config.n_embd,
        **heads(n_head, max(1, n_head // 4), width, width, 1e7),
        _MASK: config.n_vocab - len(CONTROL_TOKENS),
    }


def _block(target: RandomFile, size: int, own: Keys, also: Shapes) -> RandomFile:
    """Blocks of this size. own: further keys. also: of tensors that say what it is."""
    config = target.config()
    n_layer, last = 5 if config.n_embd >= _LARGE else 2, config.n_layer - 1
    keys = {
        **_layers(config, n_layer),
        "target_layers": ints(
            sorted({1 + i * (last - 1) // (_N_TAPS - 1) for i in range(_N_TAPS)})
        ),
        "block_size": size,
        **own,
    }
    shape = keys["attention.head_count_kv"] * keys["attention.key_length"], config.n_embd
    values: Shapes = {f"blk.{i}.attn_v.weight": shape for i in range(n_layer)}
    return RandomFile(DFLASH, keys, values | also)


def _dflash(target: RandomFile) -> RandomFile:
    return _block(target, 16, {}, {})


def _dflash2(target: RandomFile) -> RandomFile:
    """Two taps of convolution, 16 candidates."""
    n_embd, rank = target.keys["embedding_length"], _rank(target)
    own = {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": rank,
        "selector_top_k": 16,
    }
    return _block(target, 8, own, {SELECTOR: (rank, n_embd)})


def _dspark(target: RandomFile) -> RandomFile:
    """Each row of a block drafts; for deepseek4 in three layers of its own kind."""
    own = {"sample_from_anchor": True, "has_confidence_head": True}
    also: Shapes = {MARKOV: (target.config().n_vocab, _rank(target)), "conf_proj.bias": (1,)}
    plain = _block(target, 7, own, also)
    if target.arch != "deepseek4":
        return plain
    layers = {k: v for k, v in target.keys.items() if not k.startswith(_OF_MODELS)}
    layers |= {
        "block_count": _N_STREAM_LAYERS,
        "attention.compress_ratios": ints([0] * _N_STREAM_LAYERS),
        **streams(_N_STREAM_LAYERS),
    }
    of_block = {name: plain.keys[name] for name in (_MASK, "target_layers", "block_size", *own)}
    return RandomFile(DFLASH, layers | of_block, also)


def _rank(target: RandomFile) -> int:
    return 256 if target.keys["embedding_length"] >= _LARGE else 32


def drafter_shapes(drafter: RandomFile, n_vocab: int) -> Shapes:
    """Of all its tensors. n_vocab: of the target."""
    file = drafter.described()
    config = read_eagle3(file) if drafter.arch == EAGLE3 else read_dflash(file)
    return config.shapes((), n_vocab, n_vocab) | drafter.shapes


RANDOM_DRAFTERS: Mapping[str, Callable[[RandomFile], RandomFile]] = {
    "eagle3": _eagle3,
    "dflash": _dflash,
    "dflash2": _dflash2,
    "dspark": _dspark,
}
"""By the name of the kind."""
