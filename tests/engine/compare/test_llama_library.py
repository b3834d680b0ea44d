"""Which library is taken, and which does not fit the binding, from what a child found out."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.compare import llama_library
from engine.compare.llama_library import check_library, environment, folder_of, how_it_ended
from engine.compare.llama_process import LlamaProcess
from engine.errors import OptionError, PeerLibraryError
from resources import DEMO_TARGET
from tests.support.fake_llama import without_binding

SIZE = "llama_context_default_params"


def probed(size: int = 160, written: int = 160, **fields: Any) -> dict[str, Any]:
    known = {"n_ctx": 512, "offload_kqv": True} | fields
    return {
        "sizes": {SIZE: size},
        "written": {SIZE: written},
        "fields": {f"{SIZE}.{name}": value for name, value in known.items()},
    }


def check(
    monkeypatch: pytest.MonkeyPatch, folder: Path, theirs: dict[str, Any], own: dict[str, Any]
) -> None:
    def probe(where: Path | None, *, must_load: bool = True) -> dict[str, Any]:
        return own if where is None else theirs

    monkeypatch.setattr(llama_library, "_probe", probe)
    (folder / "libllama.so").touch()
    check_library(folder)


def test_a_library_of_the_same_structs_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # padding after the last field need not be written
    check(monkeypatch, tmp_path, probed(written=157), probed())


def test_a_library_that_does_not_load_in_time_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(llama_library, "_PROBE_S", 0.0)
    (tmp_path / "libllama.so").touch()
    with pytest.raises(PeerLibraryError, match="not loaded within 0 s"):
        check_library(tmp_path)


def test_a_binding_without_a_library_of_its_own_is_judged_by_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check(monkeypatch, tmp_path, probed(n_ctx=7), {})


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (probed(written=168), "returns 168 bytes from llama_context_default_params where"),
        (probed(written=152), "returns 152 bytes"),
        (probed(n_ctx=0), "n_ctx 0 for 512"),
        (probed(offload_kqv=False), "offload_kqv False for True"),
    ],
)
def test_other_structs_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, theirs: dict[str, Any], says: str
) -> None:
    with pytest.raises(PeerLibraryError, match=says):
        check(monkeypatch, tmp_path, theirs, probed())


@pytest.mark.parametrize("place", [".", "bin", "build/bin"])
def test_a_build_is_found_in_its_places(tmp_path: Path, place: str) -> None:
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "libllama.so").touch()
    assert folder_of(tmp_path) == folder.resolve() == folder_of(folder / "libllama.so")


def test_what_is_no_build_is_refused(tmp_path: Path) -> None:
    (tmp_path / "libggml.so").touch()
    for path in (tmp_path, tmp_path / "libggml.so", tmp_path / "nothing"):
        with pytest.raises(OptionError, match=r"no llama\.cpp library at .*Name the folder"):
            folder_of(path)


def test_a_child_finds_the_library_in_its_folder_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "elsewhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", "before")
    assert "LLAMA_CPP_LIB_PATH" not in environment(None)
    found = environment(tmp_path)
    assert found["LLAMA_CPP_LIB_PATH"] == str(tmp_path)
    assert found["LD_LIBRARY_PATH"] == f"{tmp_path}:before"
    assert found["GGML_NO_BACKTRACE"] == "1"


def test_ends_in_words() -> None:
    assert [how_it_ended(status) for status in (3, -6, -11)] == [
        "exit status 3",
        "signal SIGABRT",
        "signal SIGSEGV",
    ]


def test_a_process_without_the_binding_is_a_sentence_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_binding(monkeypatch)
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **settings: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **settings))
        return started[-1]

    monkeypatch.setattr("engine.compare.llama_process.subprocess.Popen", start)
    with pytest.raises(OptionError, match="pip install"):
        LlamaProcess(DEMO_TARGET)
    assert [child.returncode for child in started] == [0]


def test_a_process_that_ends_by_itself_is_told_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says = "import sys; print('src/a/b.cpp:7: GGML_ASSERT(x) failed', file=sys.stderr); sys.exit(3)"
    popen = subprocess.Popen
    monkeypatch.setattr(
        "engine.compare.llama_process.subprocess.Popen",
        lambda words, **settings: popen([words[0], "-c", says], **settings),
    )
    with pytest.raises(PeerLibraryError, match=r"in open: b\.cpp:7: GGML_ASSERT\(x\) failed\. "):
        LlamaProcess(DEMO_TARGET)
