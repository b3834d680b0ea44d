"""Shapes of the models that are written with random weights."""

from __future__ import annotations

from engine.model.config import ModelConfig, MoeConfig, SsmConfig
from engine.model.rope import RopeConfig

INTERVAL = 4
"""Every so many layers one has attention; the others are recurrent."""
_N_CTX = 4096


def _config(
    n_layer: int,
    n_embd: int,
    n_ff: int | MoeConfig,
    n_vocab: int,
    heads: tuple[int, int, int],
    sections: tuple[int, int, int, int],
    ssm: tuple[int, int, int],
) -> ModelConfig:
    """heads: attention's, those of keys and values, their dimension. ssm: d_state, key heads,
    value heads."""
    n_head, n_head_kv, head_dim = heads
    moe = n_ff if isinstance(n_ff, MoeConfig) else None
    return ModelConfig(
        architecture="qwen35" if moe is None else "qwen35moe",
        name="",
        n_layer=n_layer,
        n_mtp=1,
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_ctx_train=_N_CTX,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        eps=1e-6,
        recurrent_layers=tuple((i + 1) % INTERVAL != 0 for i in range(n_layer)),
        n_ff=0 if isinstance(n_ff, MoeConfig) else n_ff,
        rope=RopeConfig(head_dim // 4, 1e7, sections, n_ctx_orig=_N_CTX),
        ssm=SsmConfig(4, *ssm, grouped=False),
        moe=moe,
    )


_N_VOCAB = 151_936
_SECTIONS = (11, 11, 10, 0)
_LARGE = _N_VOCAB, (8, 2, 256), _SECTIONS, (128, 16, 16)
_TINY = 512, (4, 2, 64), (3, 3, 2, 0), (32, 8, 8)

CONFIGS = {
    "0.65b": _config(24, 1024, 3584, *_LARGE),
    "4b": _config(32, 2560, 9216, _N_VOCAB, (16, 4, 256), _SECTIONS, (128, 16, 32)),
    "moe-1b": _config(16, 1024, MoeConfig(32, 8, 512, 512), *_LARGE),
    # 8.4 billion parameters, of which 1.0 act on a token beside the output head
    "moe-8b-a1b": _config(24, 2048, MoeConfig(64, 4, 768, 512), *_LARGE),
    "tiny": _config(4, 256, 256, *_TINY),
    "moe-tiny": _config(4, 256, MoeConfig(8, 2, 256, 256), *_TINY),
}
"""Shapes by the name of their size; all have an MTP head."""
