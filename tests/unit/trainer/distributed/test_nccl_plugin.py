"""Whether NCCL can load a network plugin, on small libraries that the C compiler makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vlmpipe.trainer.distributed import nccl_plugin
from vlmpipe.trainer.distributed.nccl_plugin import (
    check_plugin,
    exported_symbols,
    exported_versions,
    find_plugin,
    known_versions,
    plugin_name,
)
from vlmpipe.trainer.errors import ExitCode, UserError


def library(path: Path, source: str) -> Path:
    """A shared library compiled from C."""
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=source, text=True, check=True)
    return path


def plugin(folder: Path, *versions: int) -> Path:
    """A plugin that exports these versions, and has others that it does not export."""
    source = "".join(f"int ncclNetPlugin_v{version} = 1;\n" for version in versions)
    source += "static int ncclNetPlugin_v98 __attribute__((used)) = 1; extern int ncclNetPlugin_v97;\n"
    source += '__attribute__((visibility("hidden"))) int ncclNetPlugin_v99 = 1;\n'
    source += "int ncclCollNetPlugin_v8 = 1; int *needs(void) { return &ncclNetPlugin_v97; }\n"
    return library(folder / "libnccl-net.so", source)


def nccl(folder: Path, *versions: int) -> Path:
    """A stand-in of NCCL: it names the symbols that it looks up, as the real one does."""
    names = "".join(f'"ncclNetPlugin_v{version}", "ncclCollNetPlugin_v{version}",' for version in versions)
    return library(folder / "libnccl.so.2", f"const char *names[] = {{{names} 0}};\n")


def test_exported_versions_are_those_that_nm_lists(tmp_path: Path) -> None:
    path = plugin(tmp_path, 5, 7, 10)
    assert exported_versions(path) == (5, 7, 10)
    listed = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True)
    assert sorted(exported_symbols(path)) == sorted(line.split()[-1].encode() for line in listed.stdout.splitlines())


def test_a_stripped_library_exports_the_same(tmp_path: Path) -> None:
    path = plugin(tmp_path, 6)
    subprocess.run(["strip", str(path)], check=True)
    assert exported_versions(path) == (6,)


def test_nccl_takes_the_newest_version_that_both_have(tmp_path: Path) -> None:
    found = check_plugin({}, plugin(tmp_path, 5, 6, 8, 12), nccl(tmp_path, 6, 7, 8, 9))
    assert (found.exported, found.known, found.version) == ((5, 6, 8, 12), (6, 7, 8, 9), 8)


def test_a_plugin_that_nccl_would_ignore_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        check_plugin({}, plugin(tmp_path, 4, 5), nccl(tmp_path, 6, 11))
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert "exports ncclNetPlugin_v4, ncclNetPlugin_v5" in caught.value.found
    assert "ncclNetPlugin_v6, ncclNetPlugin_v11" in caught.value.expected
    assert "cluster.reduction_server: null" in caught.value.fix


def test_a_library_without_the_interface_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exports no ncclNetPlugin"):
        check_plugin({}, plugin(tmp_path), nccl(tmp_path, 6))


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x02\x01" + b"\xff" * 80, b"\x7fELF\x01\x01"])
def test_what_is_no_library_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "libnccl-net.so"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is not a library that can be read"):
        exported_versions(path)


def test_a_library_cut_short_is_an_error(tmp_path: Path) -> None:
    path = plugin(tmp_path, 6)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match="is not a library that can be read"):
        exported_versions(path)


def test_without_a_plugin_the_image_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        check_plugin({"NCCL_NET_PLUGIN": str(tmp_path / "libnccl-net.so")}, nccl=nccl(tmp_path, 6))
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert "REDUCTION_SERVER=1" in caught.value.fix


def test_the_plugin_is_found_where_the_loader_looks(tmp_path: Path) -> None:
    path = plugin(tmp_path, 6)
    assert find_plugin({"LD_LIBRARY_PATH": f"/nowhere::{tmp_path}"}) == path
    assert find_plugin({"NCCL_NET_PLUGIN": str(path)}) == path
    assert find_plugin({"NCCL_NET_PLUGIN": "no-such-plugin"}) is None


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("", "libnccl-net.so"),
        ("gib", "libnccl-net-gib.so"),
        ("gib,other", "libnccl-net-gib.so"),
        ("libx.so", "libx.so"),
        ("/a/b", "/a/b"),
    ],
)
def test_the_plugins_name_follows_nccls_rule(named: str, expected: str) -> None:
    assert plugin_name({"NCCL_NET_PLUGIN": named}) == expected


def test_versions_of_nccl_are_read_once_each(tmp_path: Path) -> None:
    assert known_versions(nccl(tmp_path, 11, 6, 7)) == (6, 7, 11)


def test_an_environment_without_nccl_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_plugin, "find_nccl", lambda: None)
    with pytest.raises(UserError, match="torch is a build for CPUs") as caught:
        check_plugin({}, plugin(tmp_path, 6))
    assert caught.value.code == ExitCode.UNAVAILABLE


def test_the_command_says_what_nccl_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nccl_plugin, "find_nccl", lambda: nccl(tmp_path, 6, 7, 8))
    path = plugin(tmp_path, 6, 7)
    monkeypatch.setattr(sys, "argv", ["nccl_plugin", str(path)])
    assert nccl_plugin.main() == ExitCode.OK
    assert capsys.readouterr().out == f"{path}: NCCL takes ncclNetPlugin_v7 (it knows 6, 7, 8)\n"
