"""Kernels kept on disk: found again, and never trusted further than they should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import kernel_files, norm
from kernels.kernel_files import VARIABLE, kept
from kernels.llvm import program
from tests.support.implementations import Implementation

with_llvm = Implementation(norm, "with_llvm")

KEY, OTHER = "ab" * 32, "cd" * 32
CODE = bytes(range(256)) * 5


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "kept" / "kernels"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def never() -> bytes:
    raise AssertionError("compiled again")


def is_kept(key: str = KEY) -> bool:
    """Whether the code under a key is found; else nothing is left behind."""
    found = kept(key, lambda: b"compiled")
    assert found in (CODE, b"compiled")
    return found == CODE


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_code_is_compiled_once(folder):
    assert kept(KEY, lambda: CODE) == CODE
    assert kept(KEY, never) == CODE
    assert kept(OTHER, lambda: b"other") == b"other"
    assert kept(KEY, never) == CODE


def test_the_folder_is_the_users_alone(folder):
    kept(KEY, lambda: CODE)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert only_file(folder).stat().st_mode & 0o777 == 0o600


def test_without_safe_ways_to_open_a_folder_nothing_is_kept(folder, monkeypatch):
    kept(KEY, lambda: CODE)
    for name in ("O_NOFOLLOW", "O_DIRECTORY"):  # as on Windows
        monkeypatch.delattr(os, name)
    assert kept(KEY, lambda: b"again") == b"again"


@pytest.mark.parametrize("cut", [0, 1, 50, 100, -1])
def test_a_truncated_file_is_compiled_again_and_mended(folder, cut):
    kept(KEY, lambda: CODE)
    file = only_file(folder)
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    assert kept(KEY, lambda: CODE) == CODE
    assert file.read_bytes() == whole


@pytest.mark.parametrize("where", [0, 25, 90, 130, -1])
def test_a_damaged_byte_is_found(folder, where):
    kept(KEY, lambda: CODE)
    file = only_file(folder)
    whole = bytearray(file.read_bytes())
    whole[where] ^= 1
    file.write_bytes(whole)
    assert not is_kept()


def test_a_file_of_another_key_is_not_taken(folder):
    kept(KEY, lambda: CODE)
    file = only_file(folder)
    file.rename(file.with_name(file.name.replace(KEY, OTHER)))
    assert kept(OTHER, lambda: b"its own") == b"its own"


def test_a_link_to_a_file_is_not_followed(folder):
    kept(KEY, lambda: CODE)
    file = only_file(folder)
    moved = file.rename(folder.parent / "elsewhere")
    file.symlink_to(moved)
    assert not is_kept()


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_is_not_used(folder, mode):
    kept(KEY, lambda: CODE)
    folder.chmod(mode)
    assert not is_kept()
    folder.chmod(0o700)
    assert is_kept()


def test_a_file_that_others_can_write_is_not_used(folder):
    kept(KEY, lambda: CODE)
    only_file(folder).chmod(0o666)
    assert not is_kept()


def test_a_folder_of_another_user_is_not_used(folder, monkeypatch):
    kept(KEY, lambda: CODE)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert not is_kept()


def test_a_link_to_a_folder_is_not_used(folder, tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "real")
    assert kept(KEY, lambda: CODE) == CODE
    assert not list((tmp_path / "real").iterdir())


def test_a_folder_that_cannot_be_made_is_no_error(folder):
    folder.parent.write_text("a file")
    assert kept(KEY, lambda: CODE) == CODE


@pytest.mark.parametrize("failing", ["replace", "utime"])
def test_a_disk_that_takes_nothing_is_no_error(folder, monkeypatch, failing):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    kept(KEY, lambda: CODE)
    monkeypatch.setattr(os, failing, refuse)
    assert kept(KEY, never) == CODE
    assert kept(OTHER, lambda: b"other") == b"other"
    n_files = 1 if failing == "replace" else 2
    assert len(list(folder.iterdir())) == n_files, "a part of a file is left"


def test_it_can_be_switched_off(folder, monkeypatch, tmp_path):
    kept(KEY, lambda: CODE)
    monkeypatch.setenv(VARIABLE, "off")
    monkeypatch.chdir(tmp_path)
    assert not is_kept()
    assert not (tmp_path / "off").exists()


def test_without_a_choice_it_lies_in_the_folder_for_what_can_go(folder, monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("DRAFTSCOPE_DATA_DIR", str(tmp_path / "data"))
    kept(KEY, lambda: CODE)
    assert KEY in only_file(tmp_path / "data" / "kernels").name


def test_the_longest_unused_go_first(folder, monkeypatch):
    monkeypatch.setattr(kernel_files, "MOST_BYTES", 4500)
    keys = [f"{i:064x}" for i in range(4)]
    for age, key in enumerate(keys[:3]):
        kept(key, lambda: CODE)
        os.utime(folder / f"{key}.kernel", ns=(0, age))
    (folder / "not ours").write_bytes(bytes(5000))
    kept(keys[0], never)  # used just now
    kept(keys[3], lambda: CODE)
    names = {file.stem for file in folder.glob("*.kernel")}
    assert names == {keys[0], keys[2], keys[3]}
    assert (folder / "not ours").exists()


SCRIPT = """
import torch
from kernels.norm import rms_norm_with_llvm as rms_norm
torch.set_num_threads(2)
x = torch.linspace(-1, 1, 1 << 17).view(-1, 64)
print(rms_norm(x, torch.ones(64), 1e-6).double().sum().item().hex())
"""


def test_processes_at_the_same_time_and_one_after_them_get_the_same_bits(folder, monkeypatch):
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, VARIABLE: str(folder), "OMP_NUM_THREADS": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    sums = {process.communicate()[0].strip() for process in both}
    assert len(list(folder.iterdir())) == 2, "the kernel, and what the processor is"
    monkeypatch.setattr(program, "compiled", never)
    # not the program that an earlier test of this process has compiled
    monkeypatch.setattr(norm, "_program", norm._program.__wrapped__)
    x, threads = torch.linspace(-1, 1, 1 << 17).view(-1, 64), torch.get_num_threads()
    torch.set_num_threads(2)
    y = with_llvm.rms_norm(x, torch.ones(64), 1e-6)
    torch.set_num_threads(threads)
    assert {y.double().sum().item().hex()} == sums
    assert torch.allclose(y, torch.nn.functional.rms_norm(x, (64,), eps=1e-6), atol=1e-5)
