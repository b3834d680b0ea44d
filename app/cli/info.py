"""`draftscope info`: what a model file holds and what running it would cost."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np

from app.cli.common import add_model, positive, target_path
from app.cli.output import print_json, print_lines
from engine.gguf.file import GgufFile
from engine.memory.policies import POLICIES, memory_sizes
from engine.model.drafters.config import describe_drafter
from engine.model.drafters.kinds import KINDS
from engine.model.info import LayerInfo, ModelInfo, describe
from engine.model.loaded_size import is_expanded
from engine.options import COMPUTE_MODES
from engine.size_text import size_text

_DEFAULT_CONTEXT = 4096
_SHOWN = 60  # characters of a metadata value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add_model(parser)
    group = parser.add_argument_group("memory estimate")
    group.add_argument(
        "--parallel",
        type=positive,
        default=1,
        metavar="N",
        help="sequences decoded side by side (default 1)",
    )
    group.add_argument(
        "--spec-draft-n-max",
        type=positive,
        default=3,
        metavar="N",
        help="longest draft, which decides how many snapshots are kept (default 3)",
    )
    group.add_argument(
        "-c",
        "--ctx-size",
        type=positive,
        metavar="N",
        help=f"cells per sequence (default: the trained context, at most {_DEFAULT_CONTEXT})",
    )
    group.add_argument(
        "--compute",
        choices=[mode for mode in COMPUTE_MODES if mode != "auto"],
        default="",
        help="weights as loaded in this mode (default: as stored in the file)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print what the metadata and the tensor directory tell; no tensor is read."""
    with GgufFile.open(target_path(args)) as file:
        if file.architecture in KINDS:
            return _tell_drafter(args, file)
        info = describe(file)
        metadata = {key: _plain(value) for key, value in file.metadata.items()}
        identity = file.identity()
    n_ctx = args.ctx_size or min(info.n_ctx_train, _DEFAULT_CONTEXT)
    memory = {
        "n_seqs": args.parallel,
        "n_ctx": n_ctx,
        "n_rs_seq": args.spec_draft_n_max,
        "compute": args.compute,
        "policies": {
            policy: memory_sizes(
                info, args.parallel, args.spec_draft_n_max, n_ctx, policy, args.compute
            )
            for policy in POLICIES
        },
    }
    if args.json:
        print_json({**info.to_dict(), "file": identity, "memory": memory, "metadata": metadata})
    else:
        print_lines(_lines(info, memory, metadata))
    return 0


def _tell_drafter(args: argparse.Namespace, file: GgufFile) -> int:
    """The same of a file that drafts for a target, which is not known here."""
    config = KINDS[file.architecture].read(file)
    info = describe_drafter(file, config)
    n_ctx = args.ctx_size or _DEFAULT_CONTEXT
    n_bytes = info.n_bytes(args.parallel, n_ctx, args.compute)
    metadata = {key: _plain(value) for key, value in file.metadata.items()}
    if args.json:
        memory = {"n_seqs": args.parallel, "n_ctx": n_ctx, "compute": args.compute}
        own = {**asdict(info), "file": file.identity()}
        print_json({**own, "memory": {**memory, "total": n_bytes}, "metadata": metadata})
        return 0
    layers = ", ".join(map(str, info.taps))
    lines = [
        f"{info.name or 'unnamed'}, for {info.drafter}",
        f"  parameters     {info.n_params:,}",
        f"  weights        {size_text(info.weight_bytes)}",
        "  loaded         "
        + ", ".join(f"{m} {size_text(n)}" for m, n in info.loaded_bytes.items()),
        f"  reads          the inputs of layers {layers} of a target {info.n_target:,} wide",
        f"  attention      {size_text(info.cell_bytes)} per token",
        f"  memory         {size_text(n_bytes)} for {args.parallel} x {n_ctx} cells",
        "",
        "metadata",
        *(f"  {key} = {_short(value)}" for key, value in metadata.items()),
    ]
    print_lines(lines)
    return 0


def _lines(info: ModelInfo, memory: dict[str, Any], metadata: dict[str, Any]) -> list[str]:
    policies = memory["policies"]
    lines = [
        f"{info.name or 'unnamed'} ({info.architecture})",
        f"  parameters     {info.n_params:,}",
        f"  weights        {size_text(info.weight_bytes)}",
        "  loaded         "
        + ", ".join(f"{m} {size_text(n)}" for m, n in info.loaded_bytes.items()),
        f"  vocabulary     {info.n_vocab:,} tokens",
        f"  context        {info.n_ctx_train:,} tokens as trained",
        f"  rollback       {info.rollback}",
        f"  llama.cpp      {info.llama_cpp}",
        f"  snapshot       {size_text(info.state_bytes)} per plane and sequence",
        f"  replay log     {size_text(info.log_bytes_per_token)} per token",
        f"  attention      {size_text(info.kv_bytes_per_token)} per token",
        "",
        "quantisation",
        *(
            f"  {name:<8} {size_text(n):>12}" + "  f32 in mode q8" * is_expanded(name)
            for name, n in info.quant_mix.items()
        ),
        "",
        "layers",
        *_layer_lines(info.layers),
        "",
        "memory for {n_seqs} x {n_ctx} cells, drafts of up to {n_rs_seq}".format(**memory),
        f"  {'--rollback':<12}" + "".join(f" {policy:>12}" for policy in policies),
        *(
            f"  {part:<12}"
            + "".join(f" {size_text(parts[part]):>12}" for parts in policies.values())
            for part in policies["planes"]
        ),
        "",
        "metadata",
        *(f"  {key} = {_short(value)}" for key, value in metadata.items()),
    ]
    return lines


def _layer_lines(layers: tuple[LayerInfo, ...]) -> list[str]:
    """One line for each stretch of layers alike."""
    lines = []
    for (kind, quant), group in groupby(layers, key=lambda layer: (layer.kind, layer.quant)):
        members = list(group)
        first, last = members[0].index, members[-1].index
        span = str(first) if first == last else f"{first}-{last}"
        total = size_text(sum(layer.n_bytes for layer in members))
        lines.append(f"  {span:<8} {kind:<20} {quant:<16} {total:>12}")
    return lines


def _plain(value: Any) -> Any:
    """A metadata value for JSON; long arrays become their length."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list) and len(value) > 64:
        return {"length": len(value), "first": value[:4]}
    return value


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"[{value['length']:,} values]"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text):,} characters)"
