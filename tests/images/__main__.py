"""Build both images and run them: python -m tests.images (make image-test)"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.images.builder import ROOT, Builder, Clock, require_tools
from tests.images.plugin import OTHER, PLUGIN, installed_plugins
from tests.images.steps import prepare_data, train, write_run
from vlmpipe.trainer.errors import ExitCode, UserError, run_main

NAMES = ("trainer", "pipeline")
STRATEGIES = {"ddp": {}, "zero2": {"train.offload": "optimizer"}}
SENT = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", ".dockerignore", "container", "recipes")
CODE = ("vlmpipe", "pipelines", "components", "trainer")
# Told by the image's own Python, as the image's own user.
TELL = """
import importlib.util, json, os
extensions = os.environ["TORCH_EXTENSIONS_DIR"]
places = ["/", "/app", "/home/vlmpipe", extensions, "/tmp", "/usr/local", "/var/hypertune"]
print(json.dumps({
    "user": os.getuid(),
    "home": os.path.expanduser("~"),
    "extensions": extensions,
    "writable": [place for place in places if os.access(place, os.W_OK)],
    "kfp": [name for name in ("kfp", "google_cloud_pipeline_components") if importlib.util.find_spec(name)],
}))
"""
TELL_GPU = """
import json, os
names = ("PATH", "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")
print(json.dumps({name: os.environ.get(name, "") for name in names}))
"""
TELL_TORCH = """
import json
from vlmpipe.trainer.distributed.torch_build import installed_build
found = installed_build()
print(json.dumps({
    "torch-build": found.name,
    "min-driver": found.min_driver,
    "min-compute-capability": found.min_compute_capability,
}))
"""
TRY_PLUGIN = """
echo "int ncclNetPlugin_v$1 = 1;" | gcc -shared -fPIC -x c - -o /tmp/libnccl-net.so
LD_LIBRARY_PATH=/tmp python -m vlmpipe.trainer.distributed.nccl_plugin 2>&1 || test $? = 69
"""
MAX_PIPELINE_GB = 3.0


def main() -> int:
    """Build, look, run; one line for each."""
    parser = argparse.ArgumentParser(prog="make image-test", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/image-test", help="images and logs (about 10 GB)")
    parser.add_argument("--keep", action="store_true", help="keep the images: the next run builds only what changed")
    parser.add_argument(
        "--torch-build", default="", help="of the trainer image, instead of the shipped one; cpu is the smallest"
    )
    options = parser.parse_args()
    require_tools()
    builder = Builder(options.folder.resolve(), options.torch_build)
    clock = Clock()
    try:
        builder.base()
        print(f"base: {clock.lap_s():.0f} s", flush=True)
        for name in NAMES:
            builder.build(name)
            print(f"{name}: {clock.lap_s():.0f} s, {builder.size_gb(name):.2f} GB", flush=True)
        for what, check in CHECKS.items():
            check(builder)
            print(f"ok: {what} ({clock.lap_s():.0f} s)", flush=True)
    finally:
        if not options.keep:
            builder.remove()
    return ExitCode.OK


def no_traces(builder: Builder) -> None:
    """Nothing of this machine's pip, and no credentials, in any file or in the image's configuration."""
    for name in NAMES:
        expect(builder.traces(name), [], f"traces of this machine in {name}")


def trainer_environment(builder: Builder) -> None:
    """Who the trainer runs as, where it may write, and what it must not have."""
    with builder.container("trainer") as container:
        found = json.loads(builder.run(container, ["python", "-c", TELL]))
        builder.run(container, ["g++", "--version"])
    expect(
        found,
        {
            "user": 1000,
            "home": "/home/vlmpipe",
            "extensions": "/home/vlmpipe/torch_extensions",
            "writable": ["/home/vlmpipe", "/home/vlmpipe/torch_extensions", "/tmp", "/var/hypertune"],
            "kfp": [],
        },
        "the trainer image",
    )


def gpu_environment(builder: Builder) -> None:
    """What lets torch find the GPU's driver on Vertex AI and GKE, for the user of the image too, and what it needs."""
    with builder.container("trainer") as container:
        found = json.loads(builder.run(container, ["python", "-c", TELL_GPU]))
    expect(found.pop("PATH").split(":")[-1], "/usr/local/nvidia/bin", "the end of PATH in the trainer image")
    expect(
        found,
        {
            "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/usr/local/nvidia/lib",
            "NVIDIA_VISIBLE_DEVICES": "all",
            "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        },
        "variables of the trainer image",
    )


def torch_builds(builder: Builder) -> None:
    """The builds of torch are those of the labels; the pipeline image has no CUDA and is small."""
    for name in NAMES:
        labels = builder.config(name)["Labels"]
        with builder.container(name) as container:
            found = json.loads(builder.run(container, ["python", "-c", TELL_TORCH]))
        told = {key: labels.get(f"vlmpipe.{key}", "") for key in found}
        expect(found, told, f"torch of {name}, beside its labels")
    expect(builder.config("pipeline")["Labels"]["vlmpipe.torch-build"], "cpu", "torch of the pipeline image")
    expect(builder.size_gb("pipeline") < MAX_PIPELINE_GB, True, f"pipeline image below {MAX_PIPELINE_GB} GB")


def nccl_plugins(builder: Builder) -> None:
    """A plugin that this NCCL would ignore fails the build; one that it knows does not."""
    if builder.config("trainer")["Labels"]["vlmpipe.torch-build"] == "cpu":
        print("unchecked: plugins of NCCL, which the build of torch for CPUs does not have", flush=True)
        return
    with builder.container("trainer") as container:
        said = {version: builder.run(container, ["bash", "-c", TRY_PLUGIN, "-", version]) for version in ("5", "6")}
    expect("this NCCL ignores it" in said["5"], True, "a plugin with ncclNetPlugin_v5")
    expect("NCCL takes ncclNetPlugin_v6" in said["6"], True, "a plugin with ncclNetPlugin_v6")


def packages(builder: Builder) -> None:
    """What is installed fits together, is no newer than pinned, and is what the SBOM says."""
    for name in NAMES:
        build = builder.config(name)["Labels"]["vlmpipe.torch-build"]
        pins = pinned(ROOT / "constraints.txt") | pinned(ROOT / f"container/torch_builds/{build}.txt")
        with builder.container(name) as container:
            builder.run(container, ["pip", "check"])
            listed = json.loads(builder.run(container, ["pip", "list", "--format=json", "--disable-pip-version-check"]))
            bill = json.loads(builder.read(container, "app/sbom.cdx.json"))
        installed = {_plain(each["name"]): each["version"] for each in listed}
        expect(bill["metadata"]["component"]["name"], "vlmpipe", f"whose the SBOM of {name} is")
        expect(
            {_plain(each["name"]): each["version"] for each in bill["components"]},
            {name: version for name, version in installed.items() if name != "vlmpipe"},
            f"packages in the SBOM of {name}",
        )
        free = {_plain(name) for name in ("pip", "setuptools", "vlmpipe")}
        moved = {
            name: version
            for name, version in installed.items()
            if name not in free and pins.get(name) not in (version, version.partition("+")[0])
        }
        expect(moved, {}, f"packages of {name} that are not as pinned")


def pinned(path: Path) -> dict[str, str]:
    """Versions of a constraints file by package."""
    lines = (re.match(r"(\S+?)===?(\S+)", line) for line in path.read_text(encoding="utf-8").splitlines())
    return {_plain(match[1]): match[2] for match in lines if match}


def layers(builder: Builder) -> None:
    """Changed code installs no package again."""
    with tempfile.TemporaryDirectory(prefix="vlmpipe-context-") as folder:
        for name in (*SENT, *CODE):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, Path(folder, name), symlinks=True)
            else:
                shutil.copy2(ROOT / name, Path(folder, name))
        Path(folder, "trainer/changed.py").write_text("# changed\n", encoding="utf-8")
        for name in NAMES:
            output = builder.build(name, Path(folder), tag=f"changed-{name}")
            packages_part, code_part, _ = output.partition("COPY vlmpipe vlmpipe")
            expect(
                code_part != "" and "Collecting" not in packages_part, True, f"{name} takes its packages from before"
            )


def reduction_server(builder: Builder) -> None:
    """The option puts its plugin in the place of Fast Socket; without the option, nothing changes."""
    with tempfile.TemporaryDirectory(prefix="vlmpipe-plugin-") as folder:
        found = installed_plugins(builder, Path(folder, "source"))
    expect(found, {"0": [OTHER], "1": [PLUGIN]}, "NCCL's plugins")


def data_and_training(builder: Builder) -> None:
    """prepare_data in the pipeline image, then jobs of two replicas in the trainer image."""
    with tempfile.TemporaryDirectory(prefix="vlmpipe-data-") as name:
        folder = Path(name)
        for strategy, changes in STRATEGIES.items():
            run_uri = write_run(folder, strategy, changes)
            with builder.container("pipeline") as container:
                prepare_data(builder, container, folder, run_uri)
            steps, compiled = train(builder, folder, run_uri)
            if not steps:
                raise UserError(f"{strategy} made no step", code=ExitCode.UNEXPECTED)
            expect(compiled, [], f"extensions that {strategy} compiled")


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def expect(found: object, wanted: object, what: str) -> None:
    """Raise UserError that shows both when they differ."""
    if found != wanted:
        raise UserError(f"{what}: {found}", expected=str(wanted), code=ExitCode.UNEXPECTED)


CHECKS: dict[str, Callable[[Builder], None]] = {
    "no trace of this machine's pip, no credentials": no_traces,
    "trainer: not root, no kfp, its own places to write": trainer_environment,
    "trainer: finds the driver of Vertex AI and GKE": gpu_environment,
    "torch: the builds of the labels, and a small pipeline image": torch_builds,
    "trainer: plugins that NCCL would ignore are refused": nccl_plugins,
    "packages as pinned, and as in the SBOM": packages,
    "changed code installs no package again": layers,
    "REDUCTION_SERVER=1 puts its plugin in the place of Fast Socket": reduction_server,
    "prepare_data in the pipeline image; two replicas train in the trainer image (ddp; zero2 with offloading)": (
        data_and_training
    ),
}

if __name__ == "__main__":
    sys.exit(run_main(main))
