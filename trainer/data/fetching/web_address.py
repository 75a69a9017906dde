"""Addresses of the web, and the machines with such a name that may be asked: public ones only.

Records are written by strangers. An address may lead to the machine itself, its network or the cloud's metadata server.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

from vlmpipe.trainer.printable import unsafe_characters

SCHEMES = {"http": 80, "https": 443}
LONGEST_CHARS = 4096
SAFE = "%/:=&?~#+!$,;'@()*[]"  # of a path and a query, which are often written with blanks and letters of any script
PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")  # RFC 6890; releases of Python differ on it
UNICAST = ipaddress.ip_network("2000::/3")  # all of IPv6 that is assigned to networks (RFC 4291); else it is local
TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # IPv4 inside IPv6 (RFC 6052)


class AddressError(Exception):
    """An address that is never asked, and why."""


@dataclass(frozen=True)
class WebAddress:
    """A parsed address. `target`: path and query, as a request has them."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """The `Host` of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == SCHEMES[self.scheme] else f"{host}:{self.port}"

    def followed(self, location: str) -> WebAddress:
        """Where a redirect leads. Raises AddressError, also for one that gives up encryption."""
        following = parsed(urljoin(f"{self.scheme}://{self.authority}{self.target}", location))
        if self.scheme == "https" and following.scheme == "http":
            raise AddressError(f"redirects from https to http://{following.authority}")
        return following


def is_web(address: str) -> bool:
    """Return whether this is an address of the web, well formed or not."""
    return address.lower().startswith(("http://", "https://"))


def without_query(address: str) -> str:
    """The address for people: signatures and tokens are in queries."""
    return address.partition("?")[0].partition("#")[0]


def parsed(address: str) -> WebAddress:
    """The address, without its fragment. Raises AddressError."""
    if len(address) > LONGEST_CHARS:
        raise AddressError(f"an address of {len(address)} characters, more than {LONGEST_CHARS}")
    if unsafe_characters(address):
        raise AddressError("an address with control characters or marks of direction")
    try:
        parts = urlsplit(address.strip())
        host, port = (parts.hostname or ""), parts.port
        host = host if ":" in host else host.encode("idna").decode()
    except (ValueError, UnicodeError) as error:
        raise AddressError(f"no well-formed address ({error})") from error
    if parts.scheme not in SCHEMES or not host:
        raise AddressError("no address of http or https with a host")
    if parts.username is not None or parts.password is not None:
        raise AddressError("an address with a user or a password")
    target = quote(parts.path or "/", SAFE) + (f"?{quote(parts.query, SAFE)}" if parts.query else "")
    return WebAddress(parts.scheme, host, port or SCHEMES[parts.scheme], target)


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public internet, also where IPv6 holds an IPv4 address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour
        if parsed in TRANSLATED:
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if inner:
            return is_public(str(inner))
        if parsed not in UNICAST:
            return False
    return parsed.is_global and not parsed.is_multicast and parsed not in PROTOCOLS


def public_addresses(address: WebAddress) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """The IP addresses of the host, in the order of the resolver. Raises AddressError where any is not public, and
    OSError where the name has none.

    Connect to one of these and not to the name, which may mean another address when it is asked again.
    """
    results = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    places = [(family, (str(place[0]), int(place[1]))) for family, _, _, _, place in results]
    private = next((ip for _, (ip, _) in places if not is_public(ip)), "")
    if private:
        raise AddressError(f"{address.host} is {private}, which is no public address")
    return list(dict.fromkeys(places))
