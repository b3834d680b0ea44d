"""Changes of a GGUF file, each drawn as JSON and applied to its parts, its bytes or its path."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gguf_writer import ARRAY, STRING, Tensor, Typed, string
from tests.torture.gguf_parts import Parts, taken_apart

Step = dict[str, Any]
Random = np.random.Generator

_NUMBERS = (0, 1, 2, 3, 5, 7, 31, 33, 64, 255, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_REALS = (0.0, -0.0, 1.0, -1.0, 1e-38, 1e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "",
    " ",
    "\0",
    "\n",
    "é",
    "\ud800",
    "a" * 5000,
    "<|im_end|>",
    "qwen35",
    "gpt2",
    "{{",
    "%s",
)
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_FILLS = {"nan": np.nan, "inf": np.inf, "huge": 1e30, "zero": 0.0, "tiny": 1e-38, "minus": -1.0}
_FILES = ("link", "loop", "pipe", "folder", "sparse", "parts", "part missing", "part wrong")


def draw(random: Random, parts: Parts) -> Step:
    """A step for a file like this."""
    return _DRAWN[str(random.choice(_KINDS, p=_WEIGHTS))](random, parts)


def _pick(random: Random, items: Any) -> Any:
    return items[int(random.integers(len(items)))]


def _key(random: Random, parts: Parts) -> Step:
    name, typed = _pick(random, parts.metadata)
    how = _pick(random, ("value", "value", "value", "drop", "twice", "rename", "type", "count"))
    kind = int(random.integers(14)) if how == "type" else typed.type_id
    wanted = _pick(random, _REALS if kind in (6, 12) else _NUMBERS)
    if random.random() < 0.3 and kind in _FORMS and kind not in (6, 12):
        wanted = int(random.integers(0, 70))
    return {
        "do": "key",
        "key": name,
        "how": how,
        "kind": kind,
        "number": wanted,
        "text": _pick(random, _TEXTS),
        "at": int(random.integers(1 << 20)),
        "n": int(random.integers(1, 9)),
    }


def _vocabulary(random: Random, parts: Parts) -> Step:
    step = _key(random, parts)
    names = [n for n, t in parts.metadata if t.type_id == ARRAY and n.startswith("tokenizer.")]
    how = _pick(random, ("value", "count", "fewer", "more", "same"))
    return {**step, "key": _pick(random, names or [step["key"]]), "how": how}


def _tensor(random: Random, parts: Parts) -> Step:
    ne = [int(random.choice([0, 1, 2, 3, 32, 64, 255, 2**31, 2**62])) for _ in range(4)]
    kinds = ("drop", "rename", "swap", "ne", "type", "offset", "n_dims", "twice", "cut", "turn")
    return {
        "do": "tensor",
        "name": _name(_pick(random, parts.tensors)),
        "other": _name(_pick(random, parts.tensors)),
        "how": _pick(random, kinds),
        "ne": ne[: int(random.integers(0, 5))],
        "number": _pick(random, _NUMBERS),
        "kind": int(random.integers(42)),
    }


def _numbers(random: Random, parts: Parts) -> Step:
    return {
        "do": "numbers",
        "name": _name(_pick(random, parts.tensors)),
        "fill": _pick(random, list(_FILLS)),
        "at": int(random.integers(1 << 20)),
        "n": _pick(random, (1, 4, 64, 1 << 30)),
    }


def _header(random: Random, _: Parts) -> Step:
    name = _pick(random, ("n_keys", "n_tensors", "version", "alignment"))
    number = _pick(random, _NUMBERS)
    if name == "version":
        number %= 2**32
    if name == "alignment":
        number = _pick(random, (1, 8, 16, 64, 4096))
    return {"do": "header", "name": name, "number": number}


def _bytes(random: Random, parts: Parts) -> Step:
    size = len(parts.bytes())
    head = size - sum(len(t.data) for t in parts.tensors)
    return {
        "do": "bytes",
        "how": _pick(random, ("flip", "flip", "long", "cut", "insert", "remove")),
        "at": int(random.integers(_pick(random, (64, head, size)))),
        "number": _pick(random, (*_NUMBERS, int(random.integers(256)))),
        "n": int(random.integers(1, 64)),
    }


def _file(random: Random, _: Parts) -> Step:
    return {"do": "file", "how": _pick(random, _FILES), "n": int(random.integers(2, 5))}


_DRAWN = {
    "key": _key,
    "vocabulary": _vocabulary,
    "tensor": _tensor,
    "numbers": _numbers,
    "header": _header,
    "bytes": _bytes,
    "file": _file,
}
_KINDS, _WEIGHTS = list(_DRAWN), [0.3, 0.16, 0.14, 0.24, 0.03, 0.09, 0.04]


def write(parts: Parts, steps: list[Step], folder: Path) -> Path:
    """Apply steps to a copy of the parts and write what has become of them. Returns what is to be
    opened; a step that no longer finds what it changes does nothing."""
    parts = parts.copy()
    for step in steps:
        if step["do"] in _TO_PARTS:
            _TO_PARTS[step["do"]](parts, step)
    data = parts.bytes()
    for step in steps:
        if step["do"] == "bytes":
            data = _damaged(data, step)
    path = folder / "x.gguf"
    path.write_bytes(data)
    for step in steps:
        if step["do"] == "file":
            path = _moved(path, step, parts)
    return path


def _name(tensor: Tensor) -> str:
    return tensor.name if isinstance(tensor.name, str) else tensor.name.decode("latin-1")


def _change_key(parts: Parts, step: Step) -> None:
    found = [i for i, (name, _) in enumerate(parts.metadata) if name == step["key"]]
    if not found:
        return
    i, how = found[0], step["how"]
    name, typed = parts.metadata[i]
    if how == "drop":
        del parts.metadata[i]
    elif how == "twice":
        parts.metadata.append(parts.metadata[i])
    elif how == "rename":
        parts.metadata[i] = (step["text"].encode("utf-8", "surrogatepass"), typed)
    elif typed.type_id == ARRAY and how != "type":
        parts.metadata[i] = name, _changed_array(typed, step)
    else:
        parts.metadata[i] = name, _scalar(step)


def _scalar(step: Step) -> Typed:
    kind, number = step["kind"], step["number"]
    if kind == STRING:
        return Typed(STRING, string(step["text"].encode("utf-8", "surrogatepass")))
    if kind not in _FORMS:
        return Typed(kind, bytes(16))
    return Typed(kind, _packed(kind, number))


def _packed(kind: int, number: float) -> bytes:
    form = _FORMS[kind]
    if form in "fd":
        return np.array(number).astype(f"<{form}").tobytes()
    n = struct.calcsize(form)
    return (_whole(number) % 2 ** (8 * n)).to_bytes(n, "little")


def _whole(number: float) -> int:
    return int(number) if math.isfinite(number) else 2**63


def _changed_array(typed: Typed, step: Step) -> Typed:
    item, count = struct.unpack_from("<IQ", typed.payload)
    body, how = typed.payload[12:], step["how"]
    items = _items(item, count, body)
    if how == "count":
        return Typed(ARRAY, struct.pack("<IQ", item, _whole(step["number"]) % 2**64) + body)
    at = step["at"] % max(1, len(items))
    if how == "fewer":
        items = items[: -step["n"]]
    elif how == "more":
        items += items[at : at + step["n"]]
    elif how == "same" and items:
        items[at] = items[step["at"] // 7 % len(items)]
    elif items:
        text = step["text"].encode("utf-8", "surrogatepass")
        number = float(step["number"]) if item in (6, 12) else step["number"]
        items[at] = string(text) if item == STRING else _packed(item, number)
    return Typed(ARRAY, struct.pack("<IQ", item, len(items)) + b"".join(items))


def _items(item: int, count: int, body: bytes) -> list[bytes]:
    if item != STRING:
        n = struct.calcsize(_FORMS[item])
        return [body[i * n : (i + 1) * n] for i in range(min(count, len(body) // n))]
    found, at = [], 0
    while len(found) < count and at < len(body):
        end = at + 8 + int.from_bytes(body[at : at + 8], "little")
        found.append(body[at:end])
        at = end
    return found


def _change_tensor(parts: Parts, step: Step) -> None:
    places = {_name(tensor): i for i, tensor in enumerate(parts.tensors)}
    i, j = places.get(step["name"]), places.get(step["other"])
    if i is None:
        return
    tensor, how = parts.tensors[i], step["how"]
    if how == "drop":
        del parts.tensors[i]
    elif how == "twice":
        parts.tensors.append(tensor)
    elif how == "swap" and j is not None:
        other = parts.tensors[j]
        parts.tensors[i] = replace(tensor, name=other.name)
        parts.tensors[j] = replace(other, name=tensor.name)
    else:
        parts.tensors[i] = replace(tensor, **_of_tensor(tensor, step))


def _of_tensor(tensor: Tensor, step: Step) -> dict[str, Any]:
    return {
        "rename": lambda: {"name": step["other"] + ".x"},
        "ne": lambda: {"ne": step["ne"]},
        "type": lambda: {"type_id": step["kind"]},
        "offset": lambda: {"offset": step["number"] % 2**64},
        "n_dims": lambda: {"n_dims": step["number"] % 2**32},
        "cut": lambda: {"data": tensor.data[: len(tensor.data) // 2]},
        "turn": lambda: {"ne": list(tensor.ne)[::-1]},
        "swap": dict,
    }[step["how"]]()


def _change_numbers(parts: Parts, step: Step) -> None:
    for i, tensor in enumerate(parts.tensors):
        if _name(tensor) == step["name"] and tensor.type_id in (0, 8):
            if tensor.type_id == 8:  # Q8_0: the scales of the blocks
                blocks = np.frombuffer(tensor.data, np.uint8).copy().reshape(-1)
                blocks = blocks[: len(blocks) // 34 * 34].reshape(-1, 34)
                at = step["at"] % len(blocks)
                with np.errstate(over="ignore"):
                    scale = np.float16(_FILLS[step["fill"]])
                blocks[at : at + step["n"], :2] = np.frombuffer(scale.tobytes(), np.uint8)
                data = blocks.tobytes()
            else:
                values = np.frombuffer(tensor.data, np.float32).copy()
                at = step["at"] % len(values)
                values[at : at + step["n"]] = _FILLS[step["fill"]]
                data = values.tobytes()
            parts.tensors[i] = replace(tensor, data=data)


def _change_header(parts: Parts, step: Step) -> None:
    parts.overrides[step["name"]] = step["number"]


_TO_PARTS: dict[str, Callable[[Parts, Step], None]] = {
    "key": _change_key,
    "tensor": _change_tensor,
    "numbers": _change_numbers,
    "header": _change_header,
}


def _damaged(data: bytes, step: Step) -> bytes:
    at, n, how = min(step["at"], len(data)), step["n"], step["how"]
    number = int(step["number"])
    if how == "cut":
        return data[:at]
    if how == "remove":
        return data[:at] + data[at + n :]
    if how == "insert":
        return data[:at] + bytes([number % 256]) * n + data[at:]
    long = number.to_bytes(8, "little") if how == "long" else bytes([number % 256])
    return data[:at] + long + data[at + len(long) :]


def _moved(path: Path, step: Step, parts: Parts) -> Path:
    how, folder = step["how"], path.parent
    if not path.is_file():
        return path
    if how == "sparse":
        os.truncate(path, 2**33)
        return path
    if how.startswith("part"):
        return _split(path, step, how)
    other = folder / f"other{len(list(folder.iterdir()))}.gguf"
    {
        "link": lambda: other.symlink_to(path),
        "loop": lambda: other.symlink_to(other),
        "pipe": lambda: os.mkfifo(other),
        "folder": lambda: other.mkdir(),
    }[how]()
    return other


def _split(path: Path, step: Step, how: str) -> Path:
    """The file in several, perhaps without one, or with one that says it is another."""
    try:
        parts = taken_apart(path.read_bytes())
    except Exception:  # damaged already: it stays in one piece
        return path
    n = step["n"]
    names = [path.with_name(f"m-{i + 1:05d}-of-{n:05d}.gguf") for i in range(n)]
    per = -(-len(parts.tensors) // n)
    for i, name in enumerate(names):
        said = 0 if how == "part wrong" and i == n - 1 else i
        own: list[tuple[str, Typed]] = list(parts.metadata) if i == 0 else []
        own += [
            ("split.no", Typed(2, struct.pack("<H", said))),
            ("split.count", Typed(2, struct.pack("<H", n))),
            ("split.tensors.count", Typed(5, struct.pack("<i", len(parts.tensors)))),
        ]
        if not (how == "part missing" and i == n - 1):
            name.write_bytes(Parts(own, parts.tensors[i * per : (i + 1) * per]).bytes())
    return names[0]
