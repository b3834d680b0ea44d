"""Which library is taken, with which headers, and what drives it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from engine.compare import llama_library
from engine.compare.llama_api import LAYOUTS
from engine.compare.llama_library import (
    LlamaBuild,
    environment,
    find_build,
    how_it_ended,
    start_words,
)
from engine.compare.llama_process import LlamaProcess, reply_limit
from engine.errors import OptionError, PeerLibraryError
from engine.options.llama_cpp import LlamaSettings
from resources import DEMO_TARGET
from tests.support.fake_llama import without_packages

FALLBACK = [sys.executable, "-m", "engine.compare.llama_cpp"]
has_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")


def touched(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize("place", [".", "bin", "build/bin", "lib", "llama_cpp/lib"])
def test_a_build_is_found_in_its_places(tmp_path: Path, place: str) -> None:
    library = tmp_path / place / "libllama.so"
    touched(library)
    found = find_build(tmp_path)
    assert found == find_build(library) == LlamaBuild(library.resolve())
    assert start_words(found) == [*FALLBACK, str(library.resolve())]


@pytest.mark.parametrize(
    ("library", "llama_h", "ggml_h"),
    [
        ("lib/libllama.so", "include/llama.h", "include/ggml.h"),  # an install prefix
        ("build/bin/libllama.so", "include/llama.h", "ggml/include/ggml.h"),  # a build tree
        ("libllama.so", "llama.h", "ggml.h"),  # a folder with all of them
    ],
)
def test_headers_are_those_of_the_library(
    tmp_path: Path, library: str, llama_h: str, ggml_h: str
) -> None:
    touched(*(tmp_path / name for name in (library, llama_h, ggml_h)))
    folders = {(tmp_path / name).parent.resolve() for name in (llama_h, ggml_h)}
    for named in (tmp_path, tmp_path / library):
        assert set(find_build(named).headers) == folders


def test_a_build_elsewhere_names_its_sources(tmp_path: Path) -> None:
    build, sources = tmp_path / "made", tmp_path / "sources"
    touched(build / "bin" / "libllama.so", sources / "include" / "llama.h")
    touched(sources / "ggml" / "include" / "ggml.h")
    cache = build / "CMakeCache.txt"
    cache.write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={sources}\n")
    assert find_build(build).headers == (sources / "include", sources / "ggml" / "include")


def test_without_a_compiler_ctypes_drives_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    touched(tmp_path / "libllama.so", tmp_path / "llama.h", tmp_path / "ggml.h")
    monkeypatch.setenv("PATH", "")
    assert start_words(find_build(tmp_path))[:3] == FALLBACK


@has_compiler
def test_headers_that_do_not_compile_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTSCOPE_DATA_DIR", str(tmp_path / "data"))
    touched(tmp_path / "libllama.so", tmp_path / "llama.h", tmp_path / "ggml.h")
    (tmp_path / "llama.h").write_text("#error of another kind\n")
    (tmp_path / "ggml-backend.h").touch()
    with pytest.raises(PeerLibraryError, match=r"driver does not compile against .*another kind"):
        start_words(find_build(tmp_path))
    assert not list((tmp_path / "data" / "llama.cpp").iterdir())


def test_a_driver_is_compiled_once_for_a_library(tmp_path: Path) -> None:
    touched(tmp_path / "libllama.so", tmp_path / "llama.h", tmp_path / "ggml.h")
    build = find_build(tmp_path)
    first = build.stamp
    assert find_build(tmp_path).stamp == first
    (tmp_path / "llama.h").write_text("// changed\n")
    second = build.stamp
    (tmp_path / "libllama.so").write_text("rebuilt")
    assert len({first, second, build.stamp}) == 3


def test_a_wheel_is_unpacked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTSCOPE_DATA_DIR", str(tmp_path / "data"))
    wheel = tmp_path / "xllamacpp-1-cp310-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("xllamacpp/xllamacpp.abi3.so", "a library")
        archive.writestr("xllamacpp/__init__.py", "raise SystemExit")
    found = find_build(wheel)
    assert found == find_build(wheel) and not found.headers
    assert found.library.read_text() == "a library"
    assert [path.name for path in found.library.parent.iterdir()] == ["xllamacpp.abi3.so"]
    other = tmp_path / "llama_cpp_python-1-py3-none-linux_x86_64.whl"
    libraries = ("libllama.so", "libllama.so.0", "libggml.so.0", "libggml-cpu.so.0.25.3")
    with zipfile.ZipFile(other, "w") as archive:
        for name in (*libraries, "__init__.py"):
            archive.writestr(f"llama_cpp/lib/{name}", "a library")
    found = find_build(other)
    assert found.library.name == "libllama.so" and not found.headers
    assert {path.name for path in found.library.parent.iterdir()} == set(libraries)
    monkeypatch.setattr(llama_library, "_MOST_UNPACKED", 3)
    wheel.touch()
    with pytest.raises(OptionError, match="unpacks to more than"):
        find_build(wheel)
    wheel.write_text("no archive")
    with pytest.raises(OptionError, match=r"whl cannot be unpacked: .*zip"):
        find_build(wheel)


def test_what_is_no_build_is_refused(tmp_path: Path) -> None:
    touched(tmp_path / "libggml.so")
    for path in (tmp_path, tmp_path / "libggml.so", tmp_path / "nothing"):
        with pytest.raises(OptionError, match=r"no llama\.cpp library at .*Name a build tree"):
            find_build(path)
    touched(tmp_path / "other" / "libllama.a")
    with pytest.raises(OptionError, match=": none"):  # what is not at the place is none of it
        find_build(tmp_path / "nothing")
    touched(tmp_path / "src" / "libllama.a")
    with pytest.raises(OptionError, match="build with -DBUILD_SHARED_LIBS=ON"):
        find_build(tmp_path)


def test_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without_packages(monkeypatch)
    with pytest.raises(OptionError, match=r"xllamacpp is not installed.*pip install xllamacpp"):
        find_build(Path("xllamacpp"))
    with pytest.raises(OptionError, match="llama_cpp or xllamacpp is not installed"):
        find_build(None)


def test_a_child_finds_the_library_in_its_folder_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "before")
    found = environment(tmp_path)
    assert found["LD_LIBRARY_PATH"] == f"{tmp_path}:before"
    assert found["GGML_NO_BACKTRACE"] == "1"


def test_ends_in_words() -> None:
    assert [how_it_ended(status) for status in (3, -6, -11)] == [
        "exit status 3",
        "signal SIGABRT",
        "signal SIGSEGV",
    ]


OFFSETS = {
    # read off the machine code of the two functions, in four builds of August to October 2026
    "llama_model_default_params": [
        (72, {"n_gpu_layers": 16, "tensor_split": 0x20, "vocab_only": 0x40, "load_mtp": 0x45}),
        (80, {"n_gpu_layers": 16, "tensor_split": 0x28, "vocab_only": 0x48, "load_mtp": 0x4D}),
    ],
    "llama_context_default_params": [
        (160, {"n_seq_max": 12, "n_threads": 28, "flash_attn_type": 0x34, "cb_eval": 0x58}),
        (168, {"type_k": 0x68, "offload_kqv": 0x89, "kv_unified": 0x8D, "ctx_other": 0xA0}),
    ],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_those_of_the_builds(name: str) -> None:
    _, layouts = LAYOUTS[name]
    for fields, (size, offsets) in zip(layouts, OFFSETS[name], strict=True):
        kind = type(name, (ctypes.Structure,), {"_fields_": fields})
        assert ctypes.sizeof(kind) == size
        assert {field: getattr(kind, field).offset for field in offsets} == offsets


def test_a_library_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "libllama.so").write_bytes(b"no library")
    with pytest.raises(PeerLibraryError, match=r"library libllama\.so cannot be used: "):
        LlamaProcess(DEMO_TARGET, tmp_path)


@has_compiler
def test_a_library_that_is_missing_next_to_it_is_named(tmp_path: Path) -> None:
    package = tmp_path / "llama_cpp" / "lib"
    package.mkdir(parents=True)
    for name, text, other in (
        ("libggml-of-a-test.so.0", 'extern "C" int x(void) { return 1; }', []),
        ("libllama.so", 'extern "C" int x(void); int y = x();', ["libggml-of-a-test.so.0"]),
    ):
        source = tmp_path / "one.cpp"
        source.write_text(text)
        words = ["c++", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", name, str(source), *other]
        subprocess.run(words, cwd=package, check=True)
    (package / "libggml-of-a-test.so.0").unlink()
    with pytest.raises(
        PeerLibraryError,
        match=r"libllama\.so cannot be used: libggml-of-a-test\.so\.0: .* in one folder\.",
    ):
        LlamaProcess(DEMO_TARGET, tmp_path)


@pytest.mark.parametrize(
    ("last", "named"),
    [
        ("src/a/b.cpp:7: GGML_ASSERT(x) failed", r"b\.cpp:7: GGML_ASSERT\(x\) failed\. "),
        (
            "0.01.916 E srv load_model: no values in a/b\n0.01.917 E srv exiting\n0.02 I bye",
            "srv load_model: no values in a/b\\. ",
        ),
    ],
)
def test_a_process_that_ends_by_itself_leaves_its_last_words(
    last: str, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    says = f"import sys; print({last!r}, file=sys.stderr); sys.exit(3)"
    touched(tmp_path / "libllama.so")
    popen = subprocess.Popen
    monkeypatch.setattr(
        "engine.compare.llama_process.subprocess.Popen",
        lambda words, **settings: popen([words[0], "-c", says], **settings),
    )
    with pytest.raises(PeerLibraryError, match=f"in open_model: {named}"):
        LlamaProcess(DEMO_TARGET, tmp_path)


def test_a_library_that_never_answers_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    touched(tmp_path / "libllama.so")
    popen = subprocess.Popen
    monkeypatch.setattr(
        "engine.compare.llama_process.subprocess.Popen",
        lambda words, **settings: popen(
            [words[0], "-c", "import time\nwhile True: time.sleep(9)"], **settings
        ),
    )
    monkeypatch.setenv("DRAFTSCOPE_LLAMA_WAIT", "0.2")
    with pytest.raises(PeerLibraryError, match=r"did not answer open_model within 0\.2 s"):
        LlamaProcess(DEMO_TARGET, tmp_path)


@pytest.mark.parametrize("said", ["soon", "0", "-1", "nan", "inf", "1e30"])
def test_a_limit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("DRAFTSCOPE_LLAMA_WAIT", said)
    with pytest.raises(OptionError, match="DRAFTSCOPE_LLAMA_WAIT is"):
        reply_limit()


@pytest.mark.parametrize("wrong", [{"flash_attn": "yes"}, {"type_k": "q3"}, {"type_v": "f8"}])
def test_settings_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="Choose from"):
        LlamaSettings(**wrong)
