"""What llama.cpp does with a model when drafted tokens have to be undone."""

from __future__ import annotations


def llama_cpp_rollback(planes: bool | None, state_bytes: int) -> str:
    """In one line. planes: as engine.model.families.Family has it. state_bytes: of one snapshot."""
    if planes is None:
        return "removes any tail (attention cells alone)"
    size = size_text(state_bytes)
    if not planes:
        return f"no partial rollback: a checkpoint of {size} per draft"
    return f"partial rollback: n_rs_seq + 1 planes of {size}, n_rs_seq < n_ubatch - 1"


def size_text(n_bytes: int) -> str:
    """KiB up to a tenth of a MiB, then MiB."""
    small = n_bytes < 2**20 // 10
    return f"{n_bytes / 2**10:.1f} KiB" if small else f"{n_bytes / 2**20:.2f} MiB"
