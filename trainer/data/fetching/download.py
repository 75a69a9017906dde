"""Downloads one file over HTTP within bounds on bytes and time, from public addresses only."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vlmpipe.trainer.data.fetching.web_address import AddressError, WebAddress, parsed, public_addresses

MAX_REDIRECTS = 5
REDIRECTS = {301, 302, 303, 307, 308}
TEMPORARY = {408, 425, 429, 500, 502, 503, 504}  # statuses of servers that may answer later
SILENCE_S, WHOLE_S = 20.0, 120.0  # without a byte; of a download with its redirects
BLOCK_BYTES = 64 << 10
LONGEST_WAIT_S = 60.0  # that a server's Retry-After can ask for
HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "vlmpipe", "Connection": "close"}
IMAGES = ("image/", "application/octet-stream", "binary/octet-stream")  # beginnings of types; "" where none is said


class DownloadError(Exception):
    """A file that was not downloaded: why, for people.

    is_final: asking again changes nothing, also in a later run. is_tried_again: in this one it may.
    """

    def __init__(self, reason: str, *, is_final: bool, is_tried_again: bool | None = None, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.is_final, self.wait_s = is_final, min(wait_s, LONGEST_WAIT_S)
        self.is_tried_again = not is_final if is_tried_again is None else is_tried_again


@dataclass(frozen=True)
class Downloader:
    """Bounds of a download."""

    max_bytes: int
    whole_s: float = WHOLE_S
    silence_s: float = SILENCE_S
    # Trusts the authorities of the system, or those of SSL_CERT_FILE. Reading them takes longer than many downloads.
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)

    def __call__(self, address: str) -> bytes:
        """The image at the address, after at most MAX_REDIRECTS. Raises DownloadError."""
        deadline_s = time.monotonic() + self.whole_s
        try:
            following = parsed(address)
            for _ in range(MAX_REDIRECTS + 1):
                answer = self._answer(following, deadline_s)
                if isinstance(answer, bytes):
                    return answer
                following = following.followed(answer)
        except AddressError as error:
            raise DownloadError(str(error), is_final=True) from error
        except ssl.SSLCertVerificationError as error:
            reason = f"has a certificate that is refused: {error.verify_message.rstrip('.')}"
            # Certificates are renewed, and lists of authorities completed: a later run asks again.
            raise DownloadError(reason, is_final=False, is_tried_again=False) from error
        except socket.gaierror as error:  # of a dead host, or of all where the network is away
            raise DownloadError("has a host without an address", is_final=False, is_tried_again=False) from error
        except TimeoutError as error:
            raise DownloadError("takes too long", is_final=False) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise DownloadError(f"cannot be read: {str(error) or type(error).__name__}", is_final=False) from error
        raise DownloadError(f"redirects more than {MAX_REDIRECTS} times", is_final=True)

    def _answer(self, address: WebAddress, deadline_s: float) -> bytes | str:
        """The body of an answer, or where it redirects to."""
        connection = http.client.HTTPConnection(address.host, address.port)
        connection.sock = _TimedSocket(self._connected(address), deadline_s, self.silence_s)
        try:
            connection.request("GET", address.target, headers={**HEADERS, "Host": address.authority})
            with connection.getresponse() as response:
                return self._read(response)
        finally:
            connection.close()

    def _connected(self, address: WebAddress) -> socket.socket:
        """A connection to an address that was checked; the name itself is not asked again."""
        problem: OSError | None = None
        for family, place in public_addresses(address):
            plain = socket.socket(family, socket.SOCK_STREAM)
            try:
                plain.settimeout(self.silence_s)
                plain.connect(place)
                if address.scheme == "http":
                    return plain
                return self.tls.wrap_socket(plain, server_hostname=address.host)
            except OSError as error:
                plain.close()
                problem = error
        raise problem or OSError(f"{address.host} has no address")

    def _read(self, response: http.client.HTTPResponse) -> bytes | str:
        if response.status in REDIRECTS and (location := response.headers.get("Location")):
            return _as_utf8(location)
        if response.status != http.HTTPStatus.OK:
            asked = response.headers.get("Retry-After", "")
            wait_s = float(asked) if asked.isdecimal() else 0.0
            reason = f"{response.status} {response.reason}".strip()[:80]
            raise DownloadError(reason, is_final=response.status not in TEMPORARY, wait_s=wait_s)
        kind = response.headers.get_content_type() if response.headers.get("Content-Type") else ""
        if kind and not kind.startswith(IMAGES):
            raise DownloadError(f"is {kind}, no image", is_final=True)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise DownloadError("is compressed, which was not asked for", is_final=True)
        if (response.length or 0) > self.max_bytes:
            raise self._too_large()
        data = bytearray()
        while block := response.read(BLOCK_BYTES):  # IncompleteRead where it ends before its length
            data += block
            if len(data) > self.max_bytes:
                raise self._too_large()
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        if not data:
            raise DownloadError("has no bytes", is_final=True)
        return bytes(data)

    def _too_large(self) -> DownloadError:
        reason = f"has more than {self.max_bytes} bytes (data.max_image_bytes)"
        return DownloadError(reason, is_final=False, is_tried_again=False)  # a later run may allow more


def _as_utf8(header: str) -> str:
    """A header's text where a server wrote UTF-8, which http.client reads as Latin-1."""
    try:
        return header.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return header


def with_retries(
    download: Callable[[str], bytes],
    address: str,
    *,
    tries: int = 4,
    first_wait_s: float = 0.5,
    sleep: Callable[[float], None] = time.sleep,
) -> bytes:
    """The download, tried again after growing waits where asking again may help. Raises DownloadError."""
    wait_s = first_wait_s
    for left in reversed(range(tries)):
        try:
            return download(address)
        except DownloadError as error:
            if not error.is_tried_again or not left:
                raise
            sleep(max(wait_s, error.wait_s))
            wait_s *= 2
    raise AssertionError("unreachable")


class _TimedSocket:
    """Socket for http.client with a bound on all reading: a server may send a byte now and then."""

    def __init__(self, inner: socket.socket, deadline_s: float, silence_s: float) -> None:
        self._inner, self._deadline_s, self._silence_s = inner, deadline_s, silence_s

    def sendall(self, data: bytes) -> None:
        self._inner.settimeout(self._left_s())
        self._inner.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_Reader(self))

    def receive_into(self, buffer: Any) -> int:
        self._inner.settimeout(self._left_s())
        return self._inner.recv_into(buffer)

    def close(self) -> None:
        self._inner.close()

    def _left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return min(left_s, self._silence_s)


class _Reader(io.RawIOBase):
    def __init__(self, source: _TimedSocket) -> None:
        super().__init__()
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        return self._source.receive_into(buffer)
