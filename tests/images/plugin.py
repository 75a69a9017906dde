"""The Reduction Server's plugin as the trainer's recipe installs it, from a small signed package source of our own.

Google's package is closed and cannot be had here: what is checked is the recipe's part, not the plugin.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.images.builder import BASE, Builder
from vlmpipe.trainer.errors import ExitCode, UserError

SUITE = "google-fast-socket"  # where Google keeps both plugins
PLUGIN, OTHER = "google-reduction-server", "google-fast-socket"
SHORT_BASE = "localhost/vlmpipe-base-with-fast-socket"


def installed_plugins(builder: Builder, folder: Path) -> dict[str, list[str]]:
    """Which of the two plugins is in an image whose base has Fast Socket, without the option and with it.

    Raises UserError where the packages are taken although their key is none of those that the recipe names.
    """
    with package_source(folder) as (address, key):
        container = builder.buildah("from", "--pull-never", BASE)
        builder.buildah("copy", container, str(folder / f"{OTHER}.deb"), "/tmp/")
        builder.run(container, ["dpkg", "--install", f"/tmp/{OTHER}.deb"])
        builder.buildah("commit", "--rm", "--quiet", container, SHORT_BASE)
        found = {}
        for option in ("0", "1"):
            arguments = [f"BASE_IMAGE={SHORT_BASE}", f"REDUCTION_SERVER={option}", f"GOOGLE_PACKAGES={address}"]
            options = ["--target=system", *(f"--build-arg={argument}" for argument in arguments)]
            if option == "1":
                _require_refusal(builder, options)
            builder.build("trainer", tag=f"plugin-{option}", options=[*options, f"--build-arg=GOOGLE_KEYS={key}"])
            with builder.container(f"plugin-{option}") as container:
                listed = builder.run(
                    container, ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package}\n"]
                )
            lines = [line.split() for line in listed.splitlines()]
            found[option] = [line[1] for line in lines if line[0] == "installed" and line[1] in (PLUGIN, OTHER)]
    return found


def _require_refusal(builder: Builder, options: list[str]) -> None:
    """Raise UserError unless the recipe's own keys, of which none signed these packages, end the build for that."""
    try:
        builder.build("trainer", tag="plugin-of-another-key", options=options)
    except UserError as error:
        if "is not signed" not in error.found:
            raise
        return
    raise UserError("packages signed by a key that the recipe does not name were installed", code=ExitCode.UNEXPECTED)


@contextmanager
def package_source(folder: Path) -> Iterator[tuple[str, str]]:
    """Serve a signed apt repository with an empty package of each name. Yields its address, the key's fingerprint."""
    folder.mkdir(parents=True)
    site = folder / "site"
    key = _write_source(site, [_package(folder, name) for name in (PLUGIN, OTHER)], folder / "keys")
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", key
        finally:
            server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


def _package(folder: Path, name: str) -> Path:
    control = folder / name / "DEBIAN/control"
    control.parent.mkdir(parents=True)
    fields = {
        "Package": name, "Version": "1.0", "Architecture": "all", "Maintainer": "tests <t@example.com>",
        "Description": "empty",
    }  # fmt: skip
    control.write_text("".join(f"{key}: {value}\n" for key, value in fields.items()))
    path = folder / f"{name}.deb"
    _run("dpkg-deb", "--build", str(folder / name), str(path))
    return path


def _write_source(site: Path, packages: list[Path], keys: Path) -> str:
    """Write the repository below `site`. Returns the fingerprint of the key that signs it."""
    entries = []
    (site / "pool").mkdir(parents=True)
    for package in packages:
        data = package.read_bytes()
        (site / "pool" / package.name).write_bytes(data)
        control = _run("dpkg-deb", "--field", str(package)).rstrip("\n")
        entries.append(
            f"{control}\nFilename: pool/{package.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
        )
    suite = site / "dists" / SUITE
    index = "main/binary-amd64/Packages"
    (suite / index).parent.mkdir(parents=True)
    text = "\n".join(entries)
    (suite / index).write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (suite / "Release").write_text(
        f"Suite: {SUITE}\nCodename: {SUITE}\nArchitectures: amd64\nComponents: main\n"
        f"SHA256:\n {digest} {len(text)} {index}\n"
    )
    keys.mkdir(mode=0o700)
    gpg = ["gpg", "--homedir", str(keys), "--batch", "--quiet", "--pinentry-mode=loopback", "--passphrase="]
    _run(*gpg, "--quick-generate-key", "tests <t@example.com>", "default", "default", "never")
    _run(*gpg, "--clearsign", "--output", str(suite / "InRelease"), str(suite / "Release"))
    (site / "doc").mkdir()
    _run(*gpg, "--armor", "--output", str(site / "doc/apt-key.gpg"), "--export")
    listed = _run(*gpg, "--with-colons", "--list-keys")
    _run("gpgconf", "--homedir", str(keys), "--kill", "all")
    return next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr:"))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
