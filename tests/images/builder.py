"""buildah, without a daemon and without a registry: the base is made with debootstrap."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.images.pip_settings import pip_settings
from tests.support.paths import ROOT
from vlmpipe.trainer.distributed.cuda_builds import build_arguments
from vlmpipe.trainer.errors import ExitCode, UserError

BASE = "localhost/vlmpipe-base"
RELEASE = "bookworm"  # Debian's release with Python 3.11
# What the recipes expect of python:3.11-slim: Python with its headers, and certificates.
PACKAGES = "python3,python3-venv,python3-dev,ca-certificates"
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
SECRET_FILES = ("pip.conf", ".netrc", ".pypirc", "application_default_credentials.json")
INDEX_VARIABLES = {"trainer": "TORCH_INDEX_URL", "pipeline": "TORCH_CPU_INDEX_URL"}  # as container/build.sh
LARGEST_TEXT_BYTES = 1 << 20
TOOLS = {
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "gpg": "gnupg",
}  # program, and Debian's package of it


def require_tools() -> None:
    """Raise UserError (69) for a missing program, or without root's rights."""
    missing = [package for program, package in TOOLS.items() if not shutil.which(program)]
    if missing:
        raise UserError(
            f"{', '.join(missing)} not installed",
            expected="what builds and runs images here",
            fix=f"apt-get install --no-install-recommends {' '.join(missing)}",
            code=ExitCode.UNAVAILABLE,
        )
    if os.geteuid() != 0:
        raise UserError(
            "this user is not root",
            expected="root, for the base's file system and for network namespaces",
            fix="sudo make image-test, or in a virtual machine of its own",
            code=ExitCode.UNAVAILABLE,
        )


class Builder:
    """Images and containers in a folder of their own. torch_build: of the trainer image, the recipe's own if empty."""

    def __init__(self, folder: Path, torch_build: str = "") -> None:
        self.folder = folder
        self._torch_build = torch_build
        folder.mkdir(parents=True, exist_ok=True)
        self._buildah = [
            "buildah", "--log-level=error", "--root", str(folder / "storage"), "--runroot", str(folder / "run"),
            "--storage-driver", "overlay",
        ]  # fmt: skip
        self._pip = pip_settings()
        self._indexes = {name: os.environ.get(variable, "") for name, variable in INDEX_VARIABLES.items()}

    def buildah(self, *arguments: str, prefix: list[str] | None = None, **options: Any) -> str:
        """What buildah prints. Raises CalledProcessError with stderr on this process's own."""
        command = [*(prefix or []), *self._buildah, *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout.strip()

    def base(self) -> None:
        """Make the base image where there is none: Debian, with `python` and `pip` below /usr/local as python's has."""
        if BASE in self.buildah("images", "--format", "{{.Name}}").splitlines():
            return
        container = self.buildah("from", "scratch")
        try:
            root = self.buildah("mount", container)
            with (self.folder / "base.log").open("w") as log:
                for command in (
                    ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", RELEASE, root],
                    ["chroot", root, "python3", "-m", "venv", "/usr/local"],
                ):
                    subprocess.run(command, check=True, stdout=log, stderr=log)
            shutil.rmtree(Path(root, "var/cache/apt/archives"))
            self.buildah("config", "--env", f"PATH={PATH}", container)
            self.buildah("commit", "--quiet", container, BASE)
        finally:
            self.buildah("rm", container)

    def build(self, name: str, context: Path = ROOT, tag: str = "", options: Sequence[str] = ()) -> str:
        """Build one recipe as `tag`, or its own name; returns its output, which is also kept in `<name>.log`."""
        settings, secrets = self.folder / "pip.conf", [f"--secret=id=pip,src={self.folder / 'pip.conf'}"]
        settings.write_text(self._pip.text)
        index = self.folder / "torch_index"
        index.write_text(self._indexes[name])
        if self._indexes[name]:
            secrets.append(f"--secret=id=torch_index,src={index}")
        mounts = [f"--volume={path}:{path}:ro" for path in self._pip.mounts]
        if name == "trainer" and self._torch_build:
            arguments = build_arguments(self._torch_build)
            options = [*(f"--build-arg={key}={value}" for key, value in arguments.items()), *options]
        command = [
            *self._buildah, "build", "--isolation=chroot", "--network=host", "--layers", "--pull-never", *mounts,
            *secrets, f"--build-arg=BASE_IMAGE={BASE}",
            f"--file=container/{name}.Dockerfile", f"--tag=localhost/vlmpipe-{tag or name}", *options, ".",
        ]  # fmt: skip
        log = self.folder / f"{tag or name}.log"
        with log.open("w") as output:
            code = subprocess.run(command, cwd=context, stdout=output, stderr=output, check=False).returncode
        settings.unlink()
        index.unlink()
        text = log.read_text()
        if code:
            raise UserError(
                f"building {name} failed:\n  " + "\n  ".join(text.splitlines()[-15:]),
                fix=f"read {log}",
                code=ExitCode.UNEXPECTED,
            )
        return text

    def traces(self, name: str) -> list[str]:
        """Where the image mentions an address or a folder of this machine's pip, or holds a file of credentials."""
        traces = [*self._pip.traces, *filter(None, self._indexes.values())]
        wanted = [trace.encode() for trace in traces]
        found = []
        if any(trace in self.buildah("inspect", "--type=image", f"localhost/vlmpipe-{name}") for trace in traces):
            found.append("the image's configuration")
        with self.container(name) as container:
            root = Path(self.buildah("mount", container))
            for path in _files(root):
                small = path.stat().st_size < LARGEST_TEXT_BYTES
                if path.name in SECRET_FILES or (small and any(trace in path.read_bytes() for trace in wanted)):
                    found.append(str(path.relative_to(root)))
        return found

    @contextmanager
    def container(self, name: str, *options: str) -> Iterator[str]:
        """A container of the image, which is gone afterwards."""
        container = self.buildah("from", "--pull-never", *options, f"localhost/vlmpipe-{name}")
        try:
            yield container
        finally:
            self.buildah("rm", container)

    def command(self, container: str, arguments: list[str], *options: str) -> list[str]:
        """The command line that runs `arguments` in a container as its image says: user, environment and folder."""
        return [*self._buildah, "run", "--isolation=chroot", "--network=host", *options, container, "--", *arguments]

    def run(self, container: str, arguments: list[str], *options: str) -> str:
        """What a command in a container prints. Raises UserError with all that it printed when it fails."""
        done = subprocess.run(
            self.command(container, arguments, *options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise UserError(
                f"{' '.join(arguments)[:200]} ended with {done.returncode}:\n  "
                + "\n  ".join(done.stdout.splitlines()),
                code=ExitCode.UNEXPECTED,
            )
        return done.stdout

    def read(self, container: str, path: str) -> str:
        """A text file of a container. Of what `run` prints, buildah drops everything after 64 KiB where a command ends
        before its pipe is emptied."""
        return Path(self.buildah("mount", container), path).read_text(encoding="utf-8")

    def config(self, name: str) -> dict[str, Any]:
        """The configuration of an image: its `Env` as a list, `Labels`, `User` and so on."""
        found: dict[str, Any] = json.loads(self.buildah("inspect", "--type=image", f"localhost/vlmpipe-{name}"))
        return dict(found["OCIv1"]["config"])

    def remove(self) -> None:
        """Delete all images and containers; the logs stay."""
        self.buildah("rm", "--all")
        self.buildah("rmi", "--all", "--force")
        for name in ("storage", "run"):
            shutil.rmtree(self.folder / name)

    def size_gb(self, name: str) -> float:
        """The image's files, uncompressed, in GB."""
        (image,) = json.loads(self.buildah("images", "--json", f"localhost/vlmpipe-{name}"))
        number, unit = image["size"].split()
        return float(number) * {"KB": 1e-6, "MB": 1e-3, "GB": 1.0}[unit.upper()]


def _files(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in names):
            if path.is_file() and not path.is_symlink():
                yield path


class Clock:
    """Seconds since it was made or asked."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()

    def lap_s(self) -> float:
        """Seconds of this lap; the next one begins."""
        before_s, self._since_s = self._since_s, time.monotonic()
        return self._since_s - before_s
