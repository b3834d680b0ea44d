"""The head of one GGUF file (version 2 or 3): metadata and tensor directory, no tensor data."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.files import known_kind
from engine.gguf.binary import Cursor, HeadAllowance, never, shorten
from engine.gguf.part_file import PartFile

MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MIN_KEY_BYTES = 8 + 4 + 1  # empty name, type, smallest value
MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # empty name, no dimensions, type, offset
_CODES = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_SCALARS = {int(type_): struct.Struct("<" + code) for type_, code in _CODES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One directory entry. `shape` is in numpy order, `offset` absolute in its part's file.
    `n_bytes`: for a type of unknown size, the space up to the next tensor."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    n_elements: int
    n_bytes: int
    part: int
    offset: int

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the tensor can be used as one of this shape: dimensions of 1 may be missing at
        either end, and an unquantised one may be flattened."""
        if _core(self.shape) == _core(shape):
            return True
        flat = len(_core(self.shape)) == 1 and self.n_elements == prod(shape)
        return flat and self.type.block == 1


@dataclass(frozen=True, slots=True)
class Directory:
    """The head of one file; `head` is its bytes."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    head: bytes


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its leading and trailing dimensions of size 1."""
    long = [i for i, size in enumerate(shape) if size != 1]
    return tuple(shape[long[0] : long[-1] + 1]) if long else ()


def read_directory(
    file: PartFile, part: int, allowance: HeadAllowance, cancelled: Callable[[], bool] = never
) -> Directory:
    """Parse and check the head of a file; `part` is stored in every TensorInfo.

    allowance: reduced by what this part uses. Raises ModelFileError for anything that does not fit
    the format, the file's size or the allowance, and Cancelled.
    """
    cursor = Cursor(file, allowance, cancelled)
    version = _read_version(cursor)
    n_tensors, n_keys = cursor.u64(), cursor.u64()
    cursor.place = "header"
    cursor.announced(n_keys, MIN_KEY_BYTES, "metadata keys")
    cursor.announced(n_tensors, MIN_TENSOR_BYTES, "tensors")
    metadata = _read_metadata(cursor, n_keys)
    alignment = _alignment(cursor, metadata)
    cursor.place = "tensor directory"
    cursor.room_for(n_tensors, MIN_TENSOR_BYTES, "tensors")
    relative = _read_tensors(cursor, n_tensors, part, alignment)
    data_start = -(-cursor.pos // alignment) * alignment
    placed = [_place(cursor, info, data_start) for info in relative]
    tensors = {info.name: info for info in _with_sizes(placed, cursor.size)}
    _refuse_overlaps(cursor, tensors)
    allowance.n_bytes -= cursor.pos
    return Directory(version, metadata, tensors, cursor.head)


def _read_version(cursor: Cursor) -> int:
    if (magic := cursor.begin[:4]) != b"GGUF":
        what = f", it begins with {repr(magic)[1:]}"
        remedy = "Choose a GGUF model, or convert to one with llama.cpp's convert_hf_to_gguf.py."
        if (other := known_kind(cursor.begin, "model")) is not None:
            what, remedy = f" but {other[0]}{what if other[0] == 'a text' else ''}", other[1]
        raise cursor.error(f"not a GGUF file{what}", remedy)
    cursor.pos = 4
    version = cursor.u32()
    cursor.pos -= 4
    if version and version & 0xFFFF == 0:
        raise cursor.error(
            "a big-endian GGUF file", "Convert it to little endian with gguf-py's convert_endian."
        )
    if version not in (2, 3):
        raise cursor.error(
            f"GGUF version {version}, but only versions 2 and 3 are supported",
            "Convert the original model with a llama.cpp that writes version 3."
            if version > 3
            else "Convert the original model again: llama.cpp writes version 3 since 2023.",
        )
    cursor.pos += 4
    return version


def _read_metadata(cursor: Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        cursor.check_cancelled()
        cursor.place = ""
        key = cursor.text()
        cursor.place = f"key {shorten(key)}"
        if key in metadata:
            raise cursor.error("appears twice")
        metadata[key] = _read_value(cursor)
    return metadata


def _read_value(cursor: Cursor) -> Any:
    type_id = cursor.u32()
    if type_id == GGUFValueType.STRING:
        return cursor.text()
    if type_id == GGUFValueType.ARRAY:
        return _read_array(cursor)
    if type_id not in _SCALARS:
        raise cursor.error(f"unknown value type {type_id}")
    return cursor.scalar(_SCALARS[type_id])


def _read_array(cursor: Cursor) -> Any:
    item_id, count = cursor.u32(), cursor.u64()
    if item_id == GGUFValueType.STRING:
        return cursor.texts(count)
    if item_id == GGUFValueType.BOOL:
        return cursor.numbers("u1", count) != 0
    if item_id == GGUFValueType.ARRAY:
        raise cursor.error("an array of arrays, which is not supported")
    if item_id not in _SCALARS:
        raise cursor.error(f"unknown type {item_id} of array items")
    return cursor.numbers(_SCALARS[item_id].format, count)


def _alignment(cursor: Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        cursor.place = "key general.alignment"
        raise cursor.error("must be a power of two")
    return alignment


def _read_tensors(cursor: Cursor, count: int, part: int, alignment: int) -> list[TensorInfo]:
    """The directory with offsets still relative to the tensor data."""
    tensors: dict[str, TensorInfo] = {}
    for index in range(count):
        cursor.check_cancelled()
        cursor.place = f"tensor {index + 1} of {count}"
        name = cursor.text()
        cursor.place = f"tensor {shorten(name)}"
        if name in tensors:
            raise cursor.error("appears twice")
        n_dims = cursor.u32()
        if n_dims > MAX_DIMS:
            raise cursor.error(f"{n_dims} dimensions, but at most {MAX_DIMS} are allowed")
        ne = [cursor.u64() for _ in range(n_dims)]
        type_, n_elements, n_bytes = _extent(cursor, ne, cursor.u32())
        offset = cursor.u64()
        if offset % alignment:
            raise cursor.error(f"data offset {offset} is not a multiple of {alignment}")
        shape = tuple(reversed(ne))
        tensors[name] = TensorInfo(name, shape, type_, n_elements, n_bytes, part, offset)
    return list(tensors.values())


def _extent(cursor: Cursor, ne: list[int], type_id: int) -> tuple[TensorType, int, int]:
    """Type, number of elements and bytes of a tensor, checked for plausibility; 0 bytes if the size
    of the type is unknown."""
    if type_id > LARGEST_TYPE:
        raise cursor.error(f"unknown tensor type {type_id}")
    type_ = tensor_type(type_id)
    if 0 in ne:
        raise cursor.error("a dimension is zero")
    row = ne[0] if ne else 1
    if row % type_.block:
        raise cursor.error(f"rows of {row} elements cannot be divided into {type_.name} blocks")
    n_elements = prod(ne)
    n_bytes = n_elements // type_.block * type_.n_bytes
    if n_bytes > cursor.size:
        raise cursor.error(f"{n_bytes} bytes of data, but the file has only {cursor.size}")
    if n_elements >= 1 << 63:
        raise cursor.error(f"{n_elements} elements, more than a file can hold")
    return type_, n_elements, n_bytes


def _with_sizes(tensors: list[TensorInfo], size: int) -> list[TensorInfo]:
    """Tensors of a type of unknown size extend to the next one, or to the end of the file."""
    if all(info.n_bytes for info in tensors):
        return tensors
    ends = dict(pairwise(sorted({info.offset for info in tensors} | {size})))

    def room(info: TensorInfo) -> int:
        return max(0, ends.get(info.offset, 0) - info.offset)

    return [info if info.n_bytes else replace(info, n_bytes=room(info)) for info in tensors]


def _place(cursor: Cursor, info: TensorInfo, data_start: int) -> TensorInfo:
    offset = data_start + info.offset
    if offset + info.n_bytes > cursor.size:
        cursor.place = f"tensor {shorten(info.name)}"
        raise cursor.error(
            f"its data ends at byte {offset + info.n_bytes}, but the file has only {cursor.size}"
        )
    return replace(info, offset=offset)


def _refuse_overlaps(cursor: Cursor, tensors: dict[str, TensorInfo]) -> None:
    end, before = 0, ""
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        if info.offset < end:
            cursor.place = f"tensor {shorten(info.name)}"
            raise cursor.error(f"its data overlaps that of {shorten(before)}")
        end, before = info.offset + info.n_bytes, info.name


# -- types of tensors ---------------------------------------------------------------------------

LARGEST_TYPE = 1023
"""Larger numbers are treated as damage: forks use numbers up to 400."""

_NEWER = {42: "Q2_0"}
_REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip
# ik_llama.cpp's ggml.h of 2026-08-15; 36 was IQ4_NL_4_4 in llama.cpp for a short time
_IK = {
    36: "I2_S", 97: "Q8_0_X4", 98: "Q8_1_X4", 99: "Q8_2_X4", 133: "Q6_0", 134: "IQ1_BN",
    135: "IQ2_BN", 136: "Q8_K64", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K",
    141: "IQ6_K", 144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 147: "Q8_K16", 148: "Q8_K32",
    149: "Q8_KR8", 150: "Q8_K128", 151: "Q8_KV", 152: "IQ5_KS", 153: "IQ2_KT", 154: "IQ3_KT",
    155: "IQ4_KT", 156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT", 202: "Q4_0_R8", 206: "Q5_0_R4",
    208: "Q8_0_R8", 210: "Q2_K_R4", 211: "Q3_K_R4", 212: "Q4_K_R4", 213: "Q5_K_R4",
    214: "Q6_K_R4", 216: "IQ2_XXS_R4", 217: "IQ2_XS_R4", 218: "IQ3_XXS_R4", 219: "IQ1_S_R4",
    220: "IQ4_NL_R4", 221: "IQ3_S_R4", 222: "IQ2_S_R4", 223: "IQ4_XS_R8", 229: "IQ1_M_R4",
    230: "BF16_R16", 233: "Q6_0_R4", 335: "IQ2_BN_R4", 337: "IQ2_K_R4", 338: "IQ3_K_R4",
    339: "IQ4_K_R4", 340: "IQ5_K_R4", 344: "IQ4_KS_R4", 352: "IQ5_KS_R4", 353: "MXFP4_R8",
    397: "Q8_K_R16", 398: "Q8_KV_R8", 399: "Q8_K_R8",
}  # fmt: skip
# PrismML's fork; the same numbers were IQ2_TN and IQ1_TN of an old ik_llama.cpp
_PRISM = {142: "PQ2_0", 143: "PTQ1_0"}

_QUANTISE = "Use a file of another quantisation, such as Q4_K_M or Q8_0, or quantise the original"
_OBSERVE = "and inspect that with `draftscope observe`"
_REMEDIES = {
    "a newer llama.cpp": f"{_QUANTISE} again, or run it in llama-server {_OBSERVE}.",
    "an old llama.cpp": f"{_QUANTISE} again with llama-quantize.",
    "ik_llama.cpp": f"{_QUANTISE} with llama.cpp's llama-quantize, or run it in ik_llama.cpp's "
    f"server {_OBSERVE}.",
    "PrismML's llama.cpp or an old ik_llama.cpp": f"{_QUANTISE} with llama.cpp's llama-quantize, "
    f"or run it in the fork's server {_OBSERVE}.",
    "a newer llama.cpp or a fork": f"{_QUANTISE} with llama.cpp's llama-quantize, or run it in the "
    f"server that it was made for {_OBSERVE}.",
}
_NEW, _OLD, _OF_IK, _OF_PRISM, _UNKNOWN = _REMEDIES


class TensorType(NamedTuple):
    """A tensor type by its number in a file: of the gguf package, of a newer or older llama.cpp, or
    of a fork. Types that are not in the gguf package are only named, not decoded.

    name: ggml's. block: elements of a block of n_bytes; 1 and 0 if unknown. owner: the engine that
    writes it, empty for a type of the gguf package.
    """

    name: str
    block: int
    n_bytes: int
    owner: str = ""

    @property
    def remedy(self) -> str:
        """What to do about a type with an owner."""
        return _REMEDIES[self.owner]


def tensor_type(number: int) -> TensorType:
    """The type with this number in ggml, or in the engine that uses it."""
    if number in _KNOWN:
        return _KNOWN[number]
    return TensorType(f"type {number}", 1, 0, _UNKNOWN)


_KNOWN = {
    int(one): TensorType(one.name, *GGML_QUANT_SIZES[one]) for one in GGMLQuantizationType
} | {
    number: TensorType(name, 1, 0, owner)
    for owner, names in ((_NEW, _NEWER), (_OLD, _REMOVED), (_OF_IK, _IK), (_OF_PRISM, _PRISM))
    for number, name in names.items()
    if number not in list(GGMLQuantizationType)
}
