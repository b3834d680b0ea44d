"""The hash of a model's tensors: what it is, when it counts, and how it is kept."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import files
from engine.errors import Cancelled
from engine.gguf import content
from engine.gguf.content import ContentHash, hash_tensors, keep_hash, kept_file, kept_hash
from engine.gguf.file import GgufFile
from engine.trace.run_ref import same_model
from tests.support.gguf_writer import Tensor, write

WEIGHTS = np.arange(64, dtype=np.float32).reshape(8, 8)
LONG_AGO = 1_700_000_000 * 10**9


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSCOPE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(content, "_SETTLED_NS", 0)
    return kept_file()


def model(path: Path, weights: np.ndarray = WEIGHTS, mtime_ns: int = LONG_AGO) -> Path:
    write(path, {"general.name": "m"}, [Tensor.of("a", weights)])
    os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


def learnt(path: Path) -> dict[str, Any]:
    """The identity of a model once its tensors are hashed."""
    with GgufFile.open(path) as file:
        identity = file.identity()
        found = ContentHash([(identity, file.contents)])
    found.start(lambda: True)
    assert found.wait(60)
    return identity


def test_it_is_the_sha256_of_everything_behind_the_head(tmp_path: Path) -> None:
    path = model(tmp_path / "m.gguf")
    identity = learnt(path)
    with GgufFile.open(path) as file:
        ((_, _, head),) = file.contents
        info = file.tensors["a"]
    data = path.read_bytes()
    assert identity["content"] == hashlib.sha256(data[head:]).hexdigest()
    assert head <= info.offset
    assert data[:head] + data[head:] == data


def test_all_parts_count(tmp_path: Path) -> None:
    digests = []
    for last in (1.0, 2.0):
        folder = tmp_path / str(last)
        folder.mkdir()
        for part, weights in enumerate((WEIGHTS, WEIGHTS * last)):
            metadata = {"split.no": part, "split.count": 2}
            name = f"m-0000{part + 1}-of-00002.gguf"
            write(folder / name, metadata, [Tensor.of("ab"[part], weights)])
        digests.append(learnt(folder / "m-00001-of-00002.gguf")["content"])
    assert digests[0] != digests[1]


def test_a_retrained_file_of_the_same_name_is_another_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    before = learnt(model(path))
    after = learnt(model(path, WEIGHTS + 1))  # same size, same head, even the same time
    assert {k: v for k, v in before.items() if k != "content"} == {
        k: v for k, v in after.items() if k != "content"
    }
    assert not same_model(before, after)


def test_a_copy_under_another_name_is_the_same_model_once_both_are_known(tmp_path: Path) -> None:
    first = learnt(model(tmp_path / "m.gguf"))
    copy = model(tmp_path / "n.gguf", mtime_ns=LONG_AGO + 1)
    with GgufFile.open(copy) as file:
        unknown = file.identity()
    assert unknown["content"] is None
    assert not same_model(first, unknown)
    assert same_model(first, learnt(copy))


def test_while_not_known_the_time_of_the_last_change_tells_them_apart(tmp_path: Path) -> None:
    identities = []
    for mtime_ns in (LONG_AGO, LONG_AGO, LONG_AGO + 1):
        with GgufFile.open(model(tmp_path / "m.gguf", mtime_ns=mtime_ns)) as file:
            identities.append(file.identity())
    assert same_model(identities[0], identities[1])
    assert not same_model(identities[0], identities[2])


def test_drafts_belong_to_it_and_older_traces_still_compare() -> None:
    old = {"name": "m", "size": 1, "sha256": "a"}
    assert same_model(old, dict(old))
    assert not same_model(old, {**old, "name": "n"})
    assert not same_model({**old, "draft": old}, old)
    assert same_model({**old, "draft": old}, {**old, "draft": dict(old)})
    assert not same_model(
        {**old, "draft": {**old, "content": "x"}}, {**old, "draft": {**old, "content": "y"}}
    )
    assert same_model(None, None) and not same_model(old, None)


# what is kept


def test_it_is_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model(tmp_path / "m.gguf")
    found = learnt(path)["content"]
    with monkeypatch.context() as patch:
        patch.setattr(content, "hash_tensors", None)  # is not hashed again
        assert learnt(path)["content"] == found
    with GgufFile.open(path) as file:
        assert file.identity()["content"] == found
    os.utime(path, ns=(LONG_AGO, LONG_AGO + 1))
    with GgufFile.open(path) as file:
        assert file.identity()["content"] is None


def test_a_file_just_written_is_not_kept(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_SETTLED_NS", 10**12)
    learnt(model(tmp_path / "m.gguf"))
    assert not kept.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"contents": 3}',
        '{"contents": [[[], "a"], 7]}',
        '{"contents": [[[[]], "a"]]}',
        '{"contents": [[[["p", 1, 2, 3, 4]], "x"]], "version": 9} tail',
        "[" * 100_000,
        "\udcff",
    ],
)
def test_what_is_damaged_is_ignored_and_replaced(tmp_path: Path, kept: Path, text: str) -> None:
    kept.parent.mkdir()
    kept.write_bytes(text.encode("utf-8", "surrogateescape"))
    path = model(tmp_path / "m.gguf")
    with GgufFile.open(path) as file:
        assert file.identity()["content"] is None
    found = learnt(path)["content"]
    with GgufFile.open(path) as file:
        assert kept_hash(file.contents) == found
    assert os.listdir(kept.parent) == [kept.name]


def test_what_is_kept_stays_small(tmp_path: Path, kept: Path) -> None:
    with GgufFile.open(model(tmp_path / "m.gguf")) as file:
        (part,) = file.contents
    kept.parent.mkdir()
    entries = [[[[f"/p{i}", 1, 2, 3, 4]], "0" * 64] for i in range(1000)]
    kept.write_text(json.dumps({"contents": entries}))
    keep_hash([part], "1" * 64)
    contents = json.loads(kept.read_text())["contents"]
    assert (len(contents), contents[0][0][0][0]) == (256, "/p745")
    assert kept_hash([part]) == "1" * 64


def test_a_folder_that_takes_no_files_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRAFTSCOPE_DATA_DIR", str(tmp_path / "file" / "below"))
    assert learnt(model(tmp_path / "m.gguf"))["content"]


# in the background


def test_a_file_that_changed_since_it_was_opened_has_no_hash(tmp_path: Path) -> None:
    path = model(tmp_path / "m.gguf")
    with GgufFile.open(path) as file:
        parts = file.contents
    model(path, WEIGHTS + 1, LONG_AGO + 1)
    assert hash_tensors(parts) is None
    path.unlink()
    identity: dict[str, Any] = {}
    found = ContentHash([(identity, parts)])
    found.start(lambda: True)
    assert not found.wait(60)
    assert identity == {}


def test_it_waits_for_the_first_token_and_can_be_cancelled(tmp_path: Path) -> None:
    with GgufFile.open(model(tmp_path / "m.gguf")) as file:
        identity = file.identity()
        found = ContentHash([(identity, file.contents)])
        with pytest.raises(Cancelled):
            hash_tensors(file.contents, lambda: True)
    token, looks = threading.Event(), threading.Semaphore(0)

    def has_token() -> bool:
        looks.release()
        return token.is_set()

    found.start(has_token)
    for _ in range(3):
        assert looks.acquire(timeout=60)
    assert not found.known
    found.cancel()
    assert "content" not in [thread.name for thread in threading.enumerate()]
    assert not found.wait(60)
    again = ContentHash([(identity, file.contents)])
    again.tell(other := {})
    again.start(token.is_set)
    token.set()
    assert again.wait(60)
    assert identity["content"] == other["content"]


def test_the_thread_ends_before_python_does(tmp_path: Path) -> None:
    lines = f"""
        import atexit, threading
        from engine.gguf.content import ContentHash
        from engine.gguf.file import GgufFile
        atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))
        with GgufFile.open({str(model(tmp_path / "m.gguf"))!r}) as file:
            ContentHash([({{}}, file.contents)]).start(lambda: False)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(lines)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['MainThread']\n"


def test_a_disk_without_room_is_no_error(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "synced", full)
    assert learnt(model(tmp_path / "m.gguf"))["content"]
    assert not kept.exists()
