"""Archives of logs and replies, as issues have them attached."""

from __future__ import annotations

import io
import json
import random
import tarfile
import zipfile
from pathlib import Path

import pytest

from engine.analysis.findings.check import recorded
from engine.errors import OptionError, TraceFileError
from engine.files import members
from engine.observe.files import importing
from engine.observe.files.importing import import_file, recognise_file
from engine.trace.store import TraceStore

LOG = "\x1b[32mdraft acceptance rate = 0.50000 ( {0} accepted / {1} generated)\x1b[0m\n"
"""As a server writes it to a terminal."""
FILES = {"a/b/server.log": LOG.format(4, 8), "../../server.log": LOG.format(3, 6)}


def _zip(path: Path, files: dict[str, str]) -> Path:
    packing = zipfile.ZIP_STORED if path.stem == "stored" else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(path, "w", packing) as packed:
        for name, text in files.items():
            packed.writestr(name, text)
    return path


def _tar(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as packed:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            entry.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            packed.addfile(entry, io.BytesIO(text.encode()))
    return path


def _pack(path: Path, files: dict[str, str]) -> Path:
    return (_zip if path.suffix == ".zip" else _tar)(path, files)


@pytest.mark.parametrize("name", ["logs.zip", "stored.zip", "logs.tar", "logs.tar.gz"])
def test_each_file_of_an_archive_is_a_run(tmp_path: Path, name: str) -> None:
    path, store = _pack(tmp_path / name, FILES), TraceStore()
    assert recognise_file(path) == importing.ARCHIVE
    runs = [store.runs[run] for run in import_file(store, path)]
    assert [run["told"]["num_accepted_draft_tokens"] for run in runs] == [4, 3]
    names = [run["record"]["file"] for run in runs]
    assert names == ["a_b_server.log", ".._.._server.log"] and not recorded(store)
    assert list(tmp_path.iterdir()) == [path]  # nothing is left, nothing is outside


def test_what_an_archive_has_besides_is_named(tmp_path: Path) -> None:
    inner = {"start.sh": "#!/bin/sh\n", "picture.png": "\x89PNG\r\n", **FILES}
    store = TraceStore()
    assert len(import_file(store, _zip(tmp_path / "logs.zip", inner))) == 2
    (found,) = recorded(store)
    assert found.rule == "log-unread"
    assert found.message.startswith("Unread files in it: 2. The format of start.sh")


@pytest.mark.parametrize("name", ["logs.zip", "logs.tar", "logs.tar.gz"])
@pytest.mark.parametrize(
    ("files", "said"),
    [({"a.txt": "hello\n"}, "format of a.txt"), ({}, "no files"), ({"a.log": " " * 999}, "empty")],
)
def test_an_archive_without_a_log_says_why(
    tmp_path: Path, name: str, files: dict[str, str], said: str
) -> None:
    path = _pack(tmp_path / name, files or {"folder/": ""})
    with pytest.raises(TraceFileError, match=said):
        import_file(TraceStore(), path)


@pytest.mark.parametrize("name", ["inner.zip", "inner.tar.gz"])
def test_an_archive_in_an_archive_is_not_opened(tmp_path: Path, name: str) -> None:
    path = tmp_path / "outer.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.write(_pack(tmp_path / name, FILES), name)
    said = f"{name}, inside of outer.zip, is itself an archive of several files"
    with pytest.raises(TraceFileError, match=said):
        import_file(TraceStore(), path)


@pytest.mark.parametrize("name", ["a/..", "a/.", "中" * 120 + ".log", "\x00"])
def test_names_that_a_system_does_not_allow(tmp_path: Path, name: str) -> None:
    path, store = tmp_path / "logs.tar", TraceStore()
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as packed:
        entry = tarfile.TarInfo(name)
        entry.size = len(LOG)
        packed.addfile(entry, io.BytesIO(LOG.format(4, 8).encode().ljust(len(LOG))))
    (run,) = import_file(store, path)
    assert store.runs[run]["told"]["num_accepted_draft_tokens"] == 4


@pytest.mark.parametrize("cut", [60, -30])
def test_a_damaged_archive_is_named(tmp_path: Path, cut: int) -> None:
    path = _zip(tmp_path / "logs.zip", FILES)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TraceFileError, match=r"logs\.zip cannot be unpacked"):
        import_file(TraceStore(), path)


@pytest.mark.parametrize("name", ["logs.zip", "logs.tar.gz"])
def test_what_grows_more_than_any_text_is_refused(tmp_path: Path, name: str) -> None:
    path = _pack(tmp_path / name, {"a.log": "0" * (40 << 20)})
    with pytest.raises(TraceFileError, match="unpacks to more than"):
        import_file(TraceStore(), path)


def test_a_reply_in_an_archive_is_one(tmp_path: Path) -> None:
    timings = {"prompt_n": 3, "prompt_ms": 1.0, "predicted_n": 9, "predicted_ms": 2.5}
    answer = {"message": {"content": "Hi"}, "finish_reason": "stop"}
    reply = {"choices": [answer], "timings": timings | {"draft_n": 8, "draft_n_accepted": 3}}
    store = TraceStore()
    import_file(store, _zip(tmp_path / "r.zip", {"reply.json": json.dumps(reply)}))
    assert store.runs[0]["requests"][0]["told"]["draft_n_accepted"] == 3


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_damaged_archive_is_read_or_refused(tmp_path: Path, packing: int) -> None:
    rng = random.Random(packing)
    with zipfile.ZipFile(tmp_path / "logs.zip", "w", packing) as packed:
        for name, text in FILES.items():
            packed.writestr(name, text)
    whole = (tmp_path / "logs.zip").read_bytes()
    n_refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(4, len(whole))] = rng.choice([0, 0x2F, 0xFF])
        try:
            list(members(bytes(damaged), "logs.zip", 1 << 20))
        except OptionError:
            n_refused += 1
    assert n_refused > 0
