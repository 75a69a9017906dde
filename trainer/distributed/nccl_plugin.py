"""Check whether NCCL can load the network plugin that a Reduction Server needs.

NCCL opens libnccl-net.so and looks up one symbol for each plugin interface that it knows: ncclNetPlugin_v6,
ncclNetPlugin_v7 and so on. A plugin that exports none of them is ignored without an error, and the reducers are paid
for and idle. Both lists can be read from the files, without a GPU: the plugin's exported symbols, and the names in
NCCL's own library (NVIDIA/nccl, src/plugin/net.cc and src/plugin/net/).

    python -m vlmpipe.trainer.distributed.nccl_plugin [PLUGIN]

ends with 69 if this environment's NCCL cannot load the plugin. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.trainer.errors import ExitCode, UserError, run_main

SYMBOL = re.compile(rb"ncclNetPlugin_v(\d+)")
DEFAULT = "libnccl-net.so"
DEFAULT_FOLDERS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
DYNAMIC_SYMBOLS = 11  # SHT_DYNSYM of the ELF format


@dataclass(frozen=True)
class NetPlugin:
    """A plugin and the NCCL that is to load it, with the versions of the interface that each has."""

    plugin: Path
    exported: tuple[int, ...]
    nccl: Path
    known: tuple[int, ...]

    @property
    def version(self) -> int | None:
        """The version that NCCL takes, the newest that both have; None if it ignores the plugin."""
        return max(set(self.exported) & set(self.known), default=None)


def check_plugin(environment: Mapping[str, str], plugin: Path | None = None, nccl: Path | None = None) -> NetPlugin:
    """The plugin that NCCL will load.

    Raises UserError (69) if there is no plugin, no NCCL, or NCCL would ignore the plugin.
    """
    library = nccl or find_nccl()
    if library is None:
        raise UserError(
            "this environment has no NCCL: torch is a build for CPUs",
            expected="the package nvidia-nccl, which the CUDA builds of torch bring",
            fix="install a CUDA build of torch",
            code=ExitCode.UNAVAILABLE,
        )
    path = plugin or find_plugin(environment)
    if path is None:
        raise UserError(
            f"no {plugin_name(environment)} where the loader looks",
            expected="NCCL's plugin for the Reduction Server",
            fix="build the trainer image with REDUCTION_SERVER=1, or run without reducers "
            "(cluster.reduction_server: null)",
            code=ExitCode.UNAVAILABLE,
        )
    built = NetPlugin(path, exported_versions(path), library, known_versions(library))
    if built.version is None:
        raise UserError(
            f"{path} exports {_symbols(built.exported)}: this NCCL ignores it, and reducers would be paid for and idle",
            expected=f"one of {_symbols(built.known)}, which {library.name} looks up",
            fix="run without reducers (cluster.reduction_server: null), or use a plugin or an NCCL that fits the other",
            code=ExitCode.UNAVAILABLE,
        )
    return built


def plugin_name(environment: Mapping[str, str]) -> str:
    """The file that NCCL opens: libnccl-net.so, unless NCCL_NET_PLUGIN names another."""
    named = environment.get("NCCL_NET_PLUGIN", "").partition(",")[0].strip()
    if not named:
        return DEFAULT
    return named if "/" in named or named.startswith("lib") else f"libnccl-net-{named}.so"


def find_plugin(environment: Mapping[str, str]) -> Path | None:
    """The plugin's file, searched as the dynamic loader does: LD_LIBRARY_PATH, its cache, the default folders."""
    name = plugin_name(environment)
    if "/" in name:
        return Path(name) if Path(name).is_file() else None
    folders = [Path(folder) for folder in environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
    candidates = [folder / name for folder in folders] + _cached(name)
    candidates += [Path(folder, name) for folder in DEFAULT_FOLDERS]
    return next((path for path in candidates if path.is_file()), None)


def find_nccl() -> Path | None:
    """libnccl.so.2 of the package that torch brings; None beside a CPU build of torch."""
    package = importlib.util.find_spec("nvidia")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder, "nccl/lib/libnccl.so.2")
        if path.is_file():
            return path
    return None


def exported_versions(plugin: Path) -> tuple[int, ...]:
    """Versions of the network plugin interface that a library exports. Raises UserError (69) if it is no library."""
    matches = (SYMBOL.fullmatch(symbol) for symbol in exported_symbols(plugin))
    return tuple(sorted(int(match[1]) for match in matches if match))


def known_versions(nccl: Path) -> tuple[int, ...]:
    """Versions that an NCCL looks up: the names are texts in its library."""
    return tuple(sorted({int(version) for version in SYMBOL.findall(nccl.read_bytes())}))


def exported_symbols(library: Path) -> list[bytes]:
    """Names that a 64-bit little-endian ELF library defines and exports, as `nm -D --defined-only` lists them.

    Raises UserError (69) for any other file.
    """
    data = library.read_bytes()
    try:
        return _exported(data)
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise UserError(
            f"{library} is not a library that can be read: {error}",
            expected="a shared library for 64-bit Linux",
            fix="install the package that it belongs to again",
            code=ExitCode.UNAVAILABLE,
        ) from error


def _exported(data: bytes) -> list[bytes]:
    """Follows the ELF format: header, section headers, then the table of dynamic symbols and its names."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no ELF header of 64 bits")
    (sections_at,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, sections_at + index * size) for index in range(count)]
    names = []
    for _, kind, _, _, offset, length, link, _, _, entry in sections:
        if kind != DYNAMIC_SYMBOLS:
            continue
        names_at = sections[link][4]
        for at in range(offset, offset + length, entry):
            name, info, other, section = struct.unpack_from("<IBBH", data, at)
            visible = info >> 4 in (1, 2) and other & 3 in (0, 3)  # global or weak; default or protected
            if section and visible:
                start = names_at + name
                names.append(data[start : data.index(b"\0", start)])
    return names


def _cached(name: str) -> list[Path]:
    """Files of that name in the loader's cache. Not every user has ldconfig in PATH."""
    command = next((path for path in ("/sbin/ldconfig", "/usr/sbin/ldconfig") if os.access(path, os.X_OK)), None)
    if command is None:
        return []
    done = subprocess.run(
        [command, "-p"], capture_output=True, text=True, check=False, encoding="utf-8", errors="replace"
    )
    lines = (line.split() for line in done.stdout.splitlines())
    return [Path(words[-1]) for words in lines if words and words[0] == name and "=>" in words]


def _symbols(versions: tuple[int, ...]) -> str:
    return ", ".join(f"ncclNetPlugin_v{version}" for version in versions) or "no ncclNetPlugin"


def main() -> int:
    """Check the plugin of this environment and print which version NCCL takes."""
    parser = argparse.ArgumentParser(prog="python -m vlmpipe.trainer.distributed.nccl_plugin", description=__doc__)
    parser.add_argument("plugin", type=Path, nargs="?", help="the plugin's file; without it, the one that NCCL opens")
    built = check_plugin(os.environ, parser.parse_args().plugin)
    print(f"{built.plugin}: NCCL takes ncclNetPlugin_v{built.version} (it knows {', '.join(map(str, built.known))})")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(run_main(main))
