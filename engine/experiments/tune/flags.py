"""A setting as the flags of other engines, and what of it they have no setting for.

llama.cpp's names are those of its server; vLLM's and SGLang's those of their documentation pages on
speculative decoding. A drafter that an engine lacks has no flags there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from engine.experiments.tune.lengths import DraftSetting

_FILE = "FILE"
_VLLM = {
    "draft-mtp": "mtp",
    "draft-simple": "draft_model",
    "draft-eagle3": "eagle3",
    "draft-dflash": "dflash",
    "suffix": "suffix",
    "ngram-simple": "ngram",
}
_SGLANG = {
    "draft-mtp": "NEXTN",
    "draft-simple": "STANDALONE",
    "draft-eagle3": "EAGLE3",
    "draft-dflash": "DFLASH",
}
_LLAMA_LENGTH = {
    "ngram-simple": "--spec-ngram-simple-size-m {n}",
    "ngram-map-k": "--spec-ngram-map-k-size-m {n}",
    "ngram-map-k4v": "--spec-ngram-map-k4v-size-m {n}",
    "ngram-mod": "--spec-ngram-mod-n-max {n} --spec-ngram-mod-n-min 0",
}
_DRAFTS_WITH_FILE = ("draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark")


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """flags: to be added to an engine's command, empty where it cannot do it. missing: what of the
    setting it has no flag for, in words."""

    engine: str
    flags: str
    missing: tuple[str, ...] = ()


def engine_flags(
    setting: DraftSetting | None, files: Mapping[str, str] | None = None
) -> list[EngineFlags]:
    """The flags for each engine. setting: None = plain decoding. files: names of the files that
    draft, by drafter."""
    if setting is None:
        return [
            EngineFlags("llama-server", "--spec-type none"),
            EngineFlags("vLLM", "", ("decodes plainly without --speculative-config",)),
            EngineFlags("SGLang", "", ("decodes plainly without --speculative-algorithm",)),
        ]
    file = (files or {}).get(setting.drafter, _FILE)
    return [_llama_server(setting, file), _vllm(setting, file), _sglang(setting, file)]


def _llama_server(setting: DraftSetting, file: str) -> EngineFlags:
    name, drafter = "llama-server", setting.drafter
    if drafter in _LLAMA_LENGTH:
        length = _LLAMA_LENGTH[drafter].format(n=setting.n_max)
        return EngineFlags(name, f"--spec-type {drafter} {length}")
    if not drafter.startswith("draft-"):
        return EngineFlags(name, "", (f"it has no {drafter}",))
    words = [f"--spec-type {drafter}", f"--spec-draft-n-max {setting.n_max}"]
    words.append(f"--spec-draft-p-min {setting.p_min:g}")
    if drafter in _DRAFTS_WITH_FILE:
        words.append(f"-md {_quoted(file)}")
    return EngineFlags(name, " ".join(words))


def _vllm(setting: DraftSetting, file: str) -> EngineFlags:
    method = _VLLM.get(setting.drafter)
    if method is None:
        return EngineFlags("vLLM", "", (f"no setting for {setting.drafter} is known to us",))
    config: dict[str, object] = {"method": method, "num_speculative_tokens": setting.n_max}
    missing = [_no_floor(setting)] if setting.p_min else []
    if setting.drafter in _DRAFTS_WITH_FILE:
        config["model"] = "MODEL"
        missing.append("MODEL is the drafter as vLLM loads it, not a GGUF file")
    if method == "ngram":
        config["prompt_lookup_max"] = 12
    return EngineFlags(
        "vLLM", f"--speculative-config '{json.dumps(config)}'", tuple(filter(None, missing))
    )


def _sglang(setting: DraftSetting, file: str) -> EngineFlags:
    algorithm = _SGLANG.get(setting.drafter)
    if algorithm is None:
        return EngineFlags("SGLang", "", (f"no setting for {setting.drafter} is known to us",))
    words = [f"--speculative-algorithm {algorithm}"]
    missing = [_no_floor(setting)] if setting.p_min else []
    if setting.drafter in _DRAFTS_WITH_FILE:
        words.append("--speculative-draft-model-path MODEL")
        missing.append("MODEL is the drafter as SGLang loads it, not a GGUF file")
    if algorithm == "DFLASH":
        words.append(f"--speculative-num-draft-tokens {setting.n_max + 1}")
    else:
        words.append(
            f"--speculative-num-steps {setting.n_max} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {setting.n_max + 1}"
        )
    return EngineFlags("SGLang", " ".join(words), tuple(missing))


def _no_floor(setting: DraftSetting) -> str:
    return f"it has no floor on the drafter's confidence: p_min {setting.p_min:g} is left out"


def _quoted(file: str) -> str:
    return file if file.replace(".", "").replace("-", "").replace("_", "").isalnum() else _FILE
