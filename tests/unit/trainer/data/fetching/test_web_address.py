"""Only public machines are asked, whatever an address, a redirect or a name server says."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmpipe.trainer.data.fetching.web_address import AddressError, is_public, parsed, public_addresses, without_query

PRIVATE = [
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "192.0.0.8", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0",
    "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "2002:7f00:1::",
    "64:ff9b::a9fe:a9fe", "2001:db8::1", "fec0::1", "::7f00:1", "64:ff9b:1::7f00:1", "5f00::1",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::"]


@pytest.mark.parametrize("ip", PRIVATE)
def test_private_addresses_are_told_apart(ip: str) -> None:
    assert not is_public(ip)


@pytest.mark.parametrize("ip", PUBLIC)
def test_public_addresses_are_allowed(ip: str) -> None:
    assert is_public(ip)


@given(st.ip_addresses(v=4))
def test_an_address_within_ipv6_is_as_public_as_by_itself(ip: ipaddress.IPv4Address) -> None:
    number = int(ip)
    forms = [f"::ffff:{ip}", str(ipaddress.IPv6Address(int(ipaddress.IPv6Address("64:ff9b::")) | number))]
    forms.append(str(ipaddress.IPv6Address((0x2002 << 112) | (number << 80))))
    assert {is_public(form) for form in forms} == {is_public(str(ip))}


REFUSED = {
    "http://user:secret@example.com/1.png": "a user or a password",
    "http:///1.png": "no address of http",
    "http://[::1/1.png": "no well-formed address",
    "http://example.com:99999/1.png": "no well-formed address",
    "http://example.com/\u202e.png": "control characters or marks",
    "http://example.com/\r\nHost: x": "control characters or marks",
    "http://" + "a" * 70 + ".com/": "no well-formed address",
    "http://example.com/" + "a" * 5000: "5019 characters",
    "ftp://example.com/1.png": "no address of http or https",
}


@pytest.mark.parametrize("address", REFUSED)
def test_addresses_that_mislead_are_refused(address: str) -> None:
    with pytest.raises(AddressError, match=REFUSED[address]):
        parsed(address)


def test_what_people_write_is_asked_as_servers_read_it() -> None:
    found = parsed("HTTPS://Exämple.com/ä b.png?x=1&y=%20#part")
    assert (found.scheme, found.host, found.port) == ("https", "xn--exmple-cua.com", 443)
    assert (found.target, found.authority) == ("/%C3%A4%20b.png?x=1&y=%20", "xn--exmple-cua.com")
    assert parsed("http://[2606:4700::1111]:81").authority == "[2606:4700::1111]:81"
    assert without_query("https://a.b/c.png?X-Signature=s#f") == "https://a.b/c.png"


def test_redirects_are_resolved_and_keep_encryption() -> None:
    first = parsed("https://example.com/a/b.png")
    assert first.followed("../c.png").target == "/c.png"
    assert first.followed("//other.org/d").host == "other.org"
    for location in ("http://example.com/a", "http://10.0.0.1/"):
        with pytest.raises(AddressError, match="redirects from https to http"):
            first.followed(location)
    with pytest.raises(AddressError, match="no address of http"):
        first.followed("file:///etc/passwd")


def resolving(monkeypatch: pytest.MonkeyPatch, *ips: str) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 80)) for ip in ips]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: found)


def test_a_name_with_one_private_address_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "8.8.8.8", "169.254.169.254")
    with pytest.raises(AddressError, match=r"metadata.test is 169.254.169.254, which is no public address"):
        public_addresses(parsed("http://metadata.test/"))
    resolving(monkeypatch, "8.8.8.8", "8.8.8.8", "1.1.1.1")
    assert [ip for _, (ip, _) in public_addresses(parsed("http://a.test/"))] == ["8.8.8.8", "1.1.1.1"]


@pytest.mark.parametrize("host", ["localhost", "0x7f.1", "2130706433", "127.1", "[::1]", "0"])
def test_other_spellings_of_this_machine_are_refused(host: str) -> None:
    try:
        places = public_addresses(parsed(f"http://{host}/"))
    except (AddressError, OSError):
        return
    assert not places, f"{host} would be asked"
