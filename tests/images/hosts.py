"""Two hosts on this machine: network namespaces joined by a cable, each with its own address."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HOSTS = {"vlmpipe-image-0": "10.213.7.1", "vlmpipe-image-1": "10.213.7.2"}


@contextmanager
def two_hosts() -> Iterator[dict[str, str]]:
    """Names of two network namespaces and the addresses by which they reach each other; nothing else reaches them."""
    _remove()
    first, second = HOSTS
    try:
        for name in HOSTS:
            _ip("netns", "add", name)
            _ip("-netns", name, "link", "set", "lo", "up")
        _ip("-netns", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in HOSTS.items():
            _ip("-netns", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-netns", name, "link", "set", "cable", "up")
        yield HOSTS
    finally:
        _remove()


def shape(mbit_per_s: int) -> None:
    """Slow the cable between the hosts down, in both directions, by a token bucket (tbf).

    Raises CalledProcessError where the kernel has none.
    """
    for name in HOSTS:
        rate = ["rate", f"{mbit_per_s}mbit", "burst", "64kb", "latency", "400ms"]
        subprocess.run(["tc", "-netns", name, "qdisc", "add", "dev", "cable", "root", "tbf", *rate], check=True)


@contextmanager
def known_names() -> Iterator[Callable[[str, str, str], None]]:
    """Gives a function that lets one host (first argument) know a name by an address, from then on and only there."""
    folders = [Path("/etc/netns", host) for host in HOSTS]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("127.0.0.1 localhost\n")
            (folder / "resolv.conf").write_text("")  # nobody else to ask

        def know(host: str, name: str, address: str) -> None:
            with open(
                f"/etc/netns/{host}/hosts", "a", encoding="utf-8"
            ) as file:  # ip-netns(8) shows it as /etc/hosts in there
                file.write(f"{address} {name}\n")

        yield know
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def kill_all(host: str) -> None:
    """SIGKILL for every process of a host."""
    found = subprocess.run(["ip", "netns", "pids", host], check=True, stdout=subprocess.PIPE, text=True)
    for process in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def _remove() -> None:
    for name in HOSTS:
        with suppress(subprocess.CalledProcessError):
            subprocess.run(["ip", "netns", "delete", name], check=True, stderr=subprocess.DEVNULL)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
