"""Memory that a process may take: a control group's limit counts for all that is asked of a host."""

import os

import pytest

from dtrain.base import hardware as memory

LIMIT = 1 << 28


@pytest.fixture
def group(tmp_path, monkeypatch):
    """A control group of version 2 with a limit of `LIMIT` bytes: half is used, and a quarter of that cached."""
    group = tmp_path / "groups" / "a" / "b"
    group.mkdir(parents=True)
    for name, text in {"max": LIMIT, "current": LIMIT // 2, "stat": f"anon 5\ninactive_file {LIMIT // 8}"}.items():
        (group / f"memory.{name}").write_text(f"{text}\n")
    (tmp_path / "cgroup").write_text("1:name=systemd:/\n0::/a/b/c\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "groups")
    monkeypatch.setattr(memory, "_PROCESS_CGROUPS", tmp_path / "cgroup")


def test_a_group_limits_what_is_free(group):
    assert memory.total_memory() == LIMIT
    assert memory.free_host_memory(2) == (LIMIT - LIMIT // 2 + LIMIT // 8) // 2


def test_without_a_group_it_is_the_host_s(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_PROCESS_CGROUPS", tmp_path / "none")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.total_memory() == total
    assert 0 < memory.free_host_memory() <= total
