"""What llama.cpp does with a model when drafted tokens have to be undone."""

from __future__ import annotations

from engine.size_text import size_text


def llama_cpp_rollback(planes: bool | None, state_bytes: int) -> str:
    """In one line. planes: as engine.model.families.Family has it. state_bytes: of one snapshot."""
    if planes is None:
        return "removes any tail (attention cells alone)"
    size = size_text(state_bytes)
    if not planes:
        return f"no partial rollback: a checkpoint of {size} per draft"
    return f"partial rollback: n_rs_seq + 1 planes of {size}, n_rs_seq < n_ubatch - 1"
