"""Two hosts on this machine: network namespaces joined by a cable, each with its own address."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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


def _remove() -> None:
    for name in HOSTS:
        with suppress(subprocess.CalledProcessError):
            subprocess.run(["ip", "netns", "delete", name], check=True, stderr=subprocess.DEVNULL)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
