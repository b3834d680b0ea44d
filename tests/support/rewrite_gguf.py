"""Writes altered copies of a GGUF file, with the gguf package's own reader and writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Tensors = dict[str, np.ndarray]


class _Missing:
    def __repr__(self) -> str:
        return "missing"


DROP = _Missing()
_TYPES = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.INT64,
    np.uint32: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}


def rewrite(
    source: Path,
    target: Path,
    keys: Mapping[str, Any] | None = None,
    edit: Callable[[Tensors], None] | None = None,
    quantise: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Copy the all-F32 model `source` to `target`.

    keys: metadata to set, or DROP; "{arch}" stands for the architecture. edit: changes the
    tensors (numpy order) in place. quantise: types of tensors that are not to be F32, by name.
    """
    fields, original = _read(source)
    arch = fields["general.architecture"][0]
    changes = {key.format(arch=arch): value for key, value in (keys or {}).items()}
    writer = gguf.GGUFWriter(target, changes.get("general.architecture", arch))
    for key, (value, kinds) in fields.items():
        if key != "general.architecture" and key not in changes:
            writer.add_key_value(key, value, *kinds)
    for key, value in changes.items():
        if value is DROP or key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_key_value(
                key, value, gguf.GGUFValueType.ARRAY, sub_type=_TYPES[type(value[0])]
            )
        else:
            writer.add_key_value(key, value, _TYPES[type(value)])
    tensors = {name: data.copy() for name, data in original.items()}
    if edit is not None:
        edit(tensors)
    for name, data in tensors.items():
        kind = (quantise or {}).get(name)
        stored = np.ascontiguousarray(data)
        if kind is not None:
            stored = gguf.quants.quantize(stored, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@cache
def _read(source: Path) -> tuple[dict[str, tuple[Any, list[gguf.GGUFValueType]]], Tensors]:
    """Metadata by key, each value with its types, and the tensors."""
    reader = gguf.GGUFReader(source)
    fields = {
        field.name: (field.contents(), field.types)
        for field in reader.fields.values()
        if not field.name.startswith("GGUF.")
    }
    return fields, {t.name: _numbers(t.data) for t in reader.tensors}


def _numbers(data: np.ndarray) -> np.ndarray:
    return np.array(data, data.dtype if data.dtype.kind == "i" else np.float32)
