"""`draftscope info`: contents of a GGUF file, and whether it would fit into memory."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from app.cli.common import draft_paths, target_path
from app.cli.option_lines import declare
from app.cli.output import print_json, print_lines
from engine.draft.draft_files import check_draft
from engine.errors import DraftscopeError
from engine.gguf.binary import StringArray
from engine.gguf.file import GgufFile
from engine.gguf.outline import outline
from engine.gguf.tokenizer import Tokenizer
from engine.machine.host_memory import available_memory
from engine.memory.options import CacheOptions
from engine.memory.policies import POLICIES, memory_sizes
from engine.memory_need import MemoryEstimate, estimate, fits_text, server_estimate
from engine.model.drafters.config import (
    DRAFT_SIMPLE,
    KINDS,
    DrafterInfo,
    describe_draft,
    drafter_of,
)
from engine.model.families import FAMILIES
from engine.model.families.common import is_mtp_file
from engine.model.info import LayerInfo, ModelInfo, describe
from engine.model.loaded_size import note_on_type
from engine.model.tensors import DRAFT_MTP
from engine.options import COMPUTE_MODES, RunOptions, SpecOptions
from engine.plain_text import size_text

_SHOWN = 60  # characters of a metadata value
_SERVER = "llama-server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    modes = [mode for mode in COMPUTE_MODES if mode != "auto"]
    declare(parser, __name__, modes=modes, n_checkpoints=CacheOptions().ctx_checkpoints)
    parser.set_defaults(compute="")


def run(args: argparse.Namespace) -> int:
    """Print what metadata and tensor directory contain; reads no tensors.

    For any readable GGUF file it prints something, and what prevents it from running here. Raises
    ModelFileError for other files, and for files of -md what opening them raises.
    """
    path = target_path(args)
    with GgufFile.open(path, part_alone=True) as file:
        found = outline(file)
        metadata = {key: _plain(value) for key, value in file.metadata.items()}
        identity = file.identity()
    try:
        with GgufFile.open(path) as file:
            identity = file.identity()
            is_known = file.architecture in (*KINDS, *FAMILIES)
            if is_known and drafter_of(file) != DRAFT_SIMPLE:
                info: ModelInfo | DrafterInfo = describe_draft(file)[1]
                drafts: dict[str, ModelInfo | DrafterInfo] = {}
            else:
                drafts = _drafts(args, file)
                info = describe(file, has_mtp_file=DRAFT_MTP in drafts)
            problem = _problem_of_tokenizer(file)
    except DraftscopeError as error:
        if args.spec_draft_model:
            raise
        _show(args, found, identity, metadata, _outline_lines(found, error), _why(error))
        return 0
    if isinstance(info, DrafterInfo):
        n_ctx = RunOptions(n_ctx=args.ctx_size).n_ctx or RunOptions().n_batch * 2
        n_bytes = info.n_bytes(args.parallel, n_ctx, args.compute)
        memory = {"n_seqs": args.parallel, "n_ctx": n_ctx, "compute": args.compute}
        own = {**asdict(info), "memory": {**memory, "total": n_bytes}}
        lines = _drafter_lines(info, args.parallel, n_ctx, n_bytes)
    else:
        memory, table = _memory(args, info, drafts)
        own = {**info.to_dict(), "memory": memory}
        lines = [*_model_lines(info), *table]
    if problem:
        lines[1:1] = _why_lines(problem)
    _show(args, found, identity, metadata, lines, {**_why(problem), **own})
    return 0


def _problem_of_tokenizer(file: GgufFile) -> DraftscopeError | None:
    """Why the tokenizer cannot be used; an MTP file may lack one."""
    if "tokenizer.ggml.tokens" not in file.metadata and is_mtp_file(file):
        return None
    try:
        Tokenizer.from_gguf(file)
    except DraftscopeError as error:
        return error
    return None


def _show(
    args: argparse.Namespace,
    found: dict[str, Any],
    identity: dict[str, Any],
    metadata: dict[str, Any],
    lines: list[str],
    own: dict[str, Any],
) -> None:
    if args.json:
        print_json({**found, **own, "file": identity, "metadata": metadata})
        return
    shown = [f"  {key} = {_short(value)}" for key, value in metadata.items()]
    print_lines([*lines, "", "metadata", *shown])


def _why(error: DraftscopeError | None) -> dict[str, str | None]:
    return {"problem": error.message if error else None, "remedy": error.remedy if error else None}


def _why_lines(error: DraftscopeError) -> list[str]:
    return [f"  runs here      no: {error.message}", f"  what to do     {error.remedy}"]


def _drafts(args: argparse.Namespace, target: GgufFile) -> dict[str, ModelInfo | DrafterInfo]:
    """Figures of the -md files, checked against the target."""
    paths: Mapping[str, Path] = draft_paths(args) if args.spec_draft_model else {}
    found = {}
    for name, path in paths.items():
        with GgufFile.open(path) as file:
            check_draft(target, Tokenizer.from_gguf(target), file)
            found[name] = describe_draft(file)[1]
    return found


def _memory(
    args: argparse.Namespace, info: ModelInfo, drafts: dict[str, ModelInfo | DrafterInfo]
) -> tuple[dict[str, Any], list[str]]:
    """The estimates, as JSON values and as lines."""
    types = tuple(drafts)
    if any(layer.kind == "mtp" for layer in info.layers):
        types = tuple(dict.fromkeys((DRAFT_MTP, *drafts)))
    if args.spec_type is not None:
        types = args.spec_type
    options = RunOptions(
        parallel=args.parallel,
        n_ctx=args.ctx_size,
        spec=SpecOptions(types=types, n_max=args.spec_draft_n_max),
        rollback=args.rollback or RunOptions().rollback,
    )
    cache = replace(CacheOptions(), ctx_checkpoints=args.ctx_checkpoints)
    here = estimate(info, drafts, options, args.parallel, args.compute, cache)
    cell_types = args.cache_type_k, args.cache_type_v
    server = server_estimate(info, drafts, options, cell_types, cache)
    available = available_memory()
    n_max = args.spec_draft_n_max
    sizes = {
        policy: memory_sizes(info, args.parallel, n_max, here.n_ctx, policy, args.compute)
        for policy in POLICIES
    }
    memory = {
        "n_seqs": args.parallel,
        "n_ctx": here.n_ctx,
        "n_rs_seq": n_max,
        "compute": args.compute,
        "spec_types": list(types),
        "policies": sizes,
        "available": available,
        "draftscope": _plain_estimate(here),
        "llama_server": {**_plain_estimate(server), "cell_types": cell_types},
    }
    shown = _memory_lines(args, info, here, server, sizes, available)
    if info.cell[0] and not info.cell[1] and len({*cell_types}) > 1:
        memory["llama_server"]["refused"] = refused = (
            f"{_SERVER} refuses different types of K and V cells for this model: latent attention "
            "stores both as one. Use the same type for -ctk and -ctv."
        )
        shown.insert(shown.index("", 1), f"  {refused}")
    return memory, shown


def _plain_estimate(one: MemoryEstimate) -> dict[str, Any]:
    return {"n_ctx": one.n_ctx, "sizes": one.sizes, "total": one.total, "later_at_most": one.later}


def _memory_lines(
    args: argparse.Namespace,
    info: ModelInfo,
    here: MemoryEstimate,
    server: MemoryEstimate,
    sizes: dict[str, dict[str, int]],
    available: int,
) -> list[str]:
    title = f"memory for {here.n_seqs} x {here.n_ctx:,} cells here, {server.n_seqs} x "
    title += f"{server.n_ctx:,} in {_SERVER}, drafts of up to {args.spec_draft_n_max}"
    parts = list(dict.fromkeys((*here.sizes, *server.sizes)))
    later = list(dict.fromkeys((*here.later, *server.later)))
    both = here, server

    def row(name: str, cells: list[int | None]) -> str:
        return f"  {name:<22}" + "".join(
            f" {'-' if n is None else size_text(n):>12}" for n in cells
        )

    return [
        "",
        title,
        f"  {'':<22} {'draftscope':>12} {_SERVER:>12}",
        *(row(name, [one.sizes.get(name) for one in both]) for name in parts),
        row("total", [one.total for one in both]),
        *(row(f"+ {name}", [one.later.get(name) for one in both]) for name in later),
        f"  {'cells':<22} {'f32':>12} {args.cache_type_k + ' ' + args.cache_type_v:>12}",
        "  +: at most, in host memory, as conversations grow; activations are not included",
        f"  {fits_text({'here': here, f'in {_SERVER}': server}, available)}",
        "",
        "to roll back drafts, by --rollback policy",
        *(
            f"  {policy:<12} {size_text(found['snapshots'] + found['checkpoint']):>12}"
            for policy, found in sizes.items()
        ),
    ]


def _outline_lines(found: dict[str, Any], error: DraftscopeError) -> list[str]:
    """For a file that does not run here."""
    title = f"{found['name'] or 'unnamed'} ({found['architecture'] or 'no architecture'})"
    lines = [
        title,
        f"  what           {found['kind']}",
        *_why_lines(error),
        f"  parameters     {found['n_params']:,} in {found['n_tensors']:,} tensors",
        f"  weights        {size_text(found['weight_bytes'])}",
        f"  tokenizer      {found['tokenizer']}",
    ]
    if found["parts"] != 1:
        lines.append(f"  parts          one of {found['parts']}; only this one is shown")
    if found["sizes"]:
        lines += ["", "sizes", *(f"  {key:<32} {n:>12,}" for key, n in found["sizes"].items())]
    if found["quant_mix"]:
        of = {name: f"  of {owner}" for name, owner in found["unknown_types"].items()}
        lines += ["", "quantisation"]
        lines += [
            f"  {name:<12} {size_text(n):>12}{of.get(name, '')}"
            for name, n in found["quant_mix"].items()
        ]
    return lines


def _drafter_lines(info: DrafterInfo, n_seqs: int, n_ctx: int, n_bytes: int) -> list[str]:
    """For a drafter file without its target."""
    rows = "the hidden state after the final norm"
    if info.taps:
        rows = f"the inputs of layers {', '.join(map(str, info.taps))}"
    without = [f"  does not use the file's {one}*" for one in info.unused]
    return [
        f"{info.name or 'unnamed'}, for {info.drafter}",
        f"  parameters     {info.n_params:,}",
        f"  weights        {size_text(info.weight_bytes)}",
        f"  loaded         {_by_mode(info.loaded_bytes)}",
        f"  reads          {rows} of a target with n_embd = {info.n_target:,}",
        f"  attention      {size_text(info.cell_bytes)} per token",
        f"  memory         {size_text(n_bytes)} for {n_seqs} x {n_ctx} cells",
        *without,
    ]


def _model_lines(info: ModelInfo) -> list[str]:
    return [
        f"{info.name or 'unnamed'} ({info.architecture})",
        f"  parameters     {info.n_params:,}",
        f"  weights        {size_text(info.weight_bytes)}",
        f"  loaded         {_by_mode(info.loaded_bytes)}",
        f"  vocabulary     {info.n_vocab:,} tokens",
        f"  tokenizer      {info.tokenizer}",
        f"  context        {info.n_ctx_train:,} tokens in training",
        f"  rollback       {info.rollback}",
        f"  llama.cpp      {info.llama_cpp}",
        f"  snapshot       {size_text(info.state_bytes)} per plane and sequence",
        f"  replay log     {size_text(info.log_bytes_per_token)} per token",
        f"  attention      {size_text(info.kv_bytes_per_token)} per token",
        "",
        "quantisation",
        *(
            f"  {name:<8} {size_text(n):>12}  {note_on_type(name)}".rstrip()
            for name, n in info.quant_mix.items()
        ),
        "",
        "layers",
        *_layer_lines(info.layers),
    ]


def _by_mode(n_bytes: dict[str, int]) -> str:
    return ", ".join(f"{mode} {size_text(n)}" for mode, n in n_bytes.items())


def _layer_lines(layers: tuple[LayerInfo, ...]) -> list[str]:
    """One line per run of equal layers."""
    lines = []
    for (kind, quant), group in groupby(layers, key=lambda layer: (layer.kind, layer.quant)):
        members = list(group)
        first, last = members[0].index, members[-1].index
        span = str(first) if first == last else f"{first}-{last}"
        total = size_text(sum(layer.n_bytes for layer in members))
        lines.append(f"  {span:<8} {kind:<23} {quant:<16} {total:>12}")
    return lines


def _plain(value: Any) -> Any:
    """A metadata value for JSON; long arrays are replaced by their length."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, StringArray)):
        return list(value) if len(value) <= 64 else {"length": len(value), "first": value[:4]}
    return value


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"[{value['length']:,} values]"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text):,} characters)"
