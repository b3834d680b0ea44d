"""How much memory is left, by the system and by control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.machine import host_memory as module
from engine.machine.host_memory import available_memory, fits_in_memory


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where control groups are; the system has 4,000 KiB left."""
    (tmp_path / "meminfo").write_text("MemTotal: 8000 kB\nMemAvailable:    4000 kB\n")
    (tmp_path / "cgroup").write_text("4:cpu,memory:/a/b\n1:name=systemd:/\n0::/a/b\n")
    monkeypatch.setattr(module, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(module, "_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(module, "_GROUPS", tmp_path / "groups")
    return tmp_path / "groups"


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content + "\n")


def test_without_limits_it_is_what_the_system_says(groups: Path) -> None:
    assert available_memory() == 4000 * 1024
    group(groups / "a" / "b", memory__max="max", memory__current="5")
    assert available_memory() == 4000 * 1024
    assert fits_in_memory(3000 * 1024) and not fits_in_memory(3000 * 1024 + 1)


def test_the_tightest_group_decides_and_cached_files_count_as_free(groups: Path) -> None:
    stat = "anon 1\nactive_file 300000\ninactive_file 200000\nfile_dirty nothing"
    group(groups / "a" / "b", memory__max="max", memory__current="5")
    group(groups / "a", memory__max="3000000", memory__current="1000000", memory__stat=stat)
    assert available_memory() == 2500000
    group(groups / "a" / "b", memory__max="9000", memory__current="9500", memory__stat="")
    assert available_memory() == 0


def test_groups_of_version_1_count_too(groups: Path) -> None:
    group(
        groups / "memory" / "a",
        memory__limit_in_bytes="3000000",
        memory__usage_in_bytes="1000000",
        memory__stat="total_inactive_file 7\ncache 9",
    )
    assert available_memory() == 2000007


def test_in_a_container_the_root_is_its_own_group(groups: Path) -> None:
    (groups.parent / "cgroup").write_text("0::/../../elsewhere\n")
    group(groups, memory__max="3000", memory__current="1000", memory__stat="")
    assert available_memory() == 2000


def test_another_system_has_half_of_its_memory(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (groups.parent / "meminfo").unlink()
    monkeypatch.setattr(module.os, "sysconf", {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.get)
    assert available_memory() == 5 * 4096
    monkeypatch.delattr(module.os, "sysconf")
    assert available_memory() == 0 and not fits_in_memory(1)
