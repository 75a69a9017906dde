"""Every remedy that the machine check or the doctor can print: what it names exists, and its tool takes it.

A remedy that is new or changed is not in the table, and the test says so. What is tried of each stands beside it; what
is left of its text must be words, without a command, a field or a variable that nothing tried.
"""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.google_apis import FakeGoogle
from tests.support.paths import ROOT
from tests.support.remedies import remedies_of
from vlmpipe.config.run_config import load_run_file
from vlmpipe.doctor import remedies

MODULES = (
    *sorted((ROOT / "trainer/preflight").glob("*.py")),
    *sorted((ROOT / "vlmpipe/doctor").glob("*.py")),
    *(ROOT / name for name in ("trainer/distributed/nccl_plugin.py", "trainer/storage/hub/client.py")),
    *(ROOT / name for name in ("trainer/secret_manager.py", "vlmpipe/google_cloud/client.py")),
)
LOGIN = "gcloud auth application-default login"
OLDER = (
    "python container/pin_torch.py cu126 --index-url INDEX", "make build TORCH_BUILD=cu126 TORCH_INDEX_URL=INDEX"
)  # fmt: skip
HF_TOKEN = ("model.hub_token_secret", "HF_TOKEN", "hf auth login")
# By template: what is tried of it. {...} is a value, {remedies.f} a command that has a test of its own.
TABLE: dict[str, tuple[str, ...]] = {
    # ---- the machine check
    "build the trainer image from the version of vlmpipe that submits the run": (),
    "start fewer (cluster.processes_per_replica={count}, cluster.replica_count=1), or train on the CPU "
    "(CUDA_VISIBLE_DEVICES set to nothing)": (
        "cluster.processes_per_replica={count}", "cluster.replica_count=1", "CUDA_VISIBLE_DEVICES"
    ),
    "start the job again, on another machine: a GPU or its driver hangs here": (),
    "the lines above are its own; if they name the driver or a GPU, start the job on another machine": (),
    f"build the trainer image for an older CUDA: {', then '.join(OLDER)}": OLDER,
    f"take a GPU of that list, or build an image whose CUDA still has code for it: {', then '.join(OLDER)}": OLDER,
    "build the trainer image with make build: its torch has CUDA; this is a build for CPUs": ("make build",),
    "correct cluster.accelerator_type and plan again; a slice of a GPU (MIG) has less memory than the GPU": (
        "cluster.accelerator_type",
    ),
    "set train.float8 to none, or take another cluster.accelerator_type": ("train.float8", "cluster.accelerator_type"),
    "correct cluster.accelerator_type, so that the plan is that of these GPUs": ("cluster.accelerator_type",),
    "set TMPDIR in cluster.env to a folder of the large disk, if there is one: checkpoints need room there": (
        "TMPDIR", "cluster.env"
    ),
    "set cluster.accelerator_type to their own type if it has one, or kubeflow.node_selector to other nodes": (
        "cluster.accelerator_type", "kubeflow.node_selector"
    ),
    "start the job again: on Vertex AI it gets another machine; a broken GPU is worth a word to the provider": (),
    "start the job on another machine; nvidia-smi there says more": ("nvidia-smi",),
    "build the image without the extra linear-attention, or with other versions of triton and flash-linear-attention; "
    "torch's own code is slower and keeps more memory": (),
    "the driver's libraries are not found: on Vertex AI and GKE they lie in /usr/local/nvidia/lib64, which "
    "LD_LIBRARY_PATH of the image must name, as images of make build do. If it does, start the job on another "
    "machine": ("/usr/local/nvidia/lib64", "LD_LIBRARY_PATH", "make build"),
    "{first.fix}\ncluster.machine_check=warn starts the job all the same": ("cluster.machine_check=warn",),
    "{error.fix}\ncluster.machine_check=warn starts the job all the same": ("cluster.machine_check=warn",),
    "check the disk or the mount under output.root_uri": ("output.root_uri",),
    "records of a run are replaced, and old checkpoints and exports deleted: give the account these permissions": (),
    "this machine's clock is {abs(report.clock_ahead_s)} s ahead of the store's: set it (NTP), or signed requests may "
    "be refused and logs cannot be put in order": (),
    "this machine's clock is {abs(report.clock_ahead_s)} s behind the store's: set it (NTP), or signed requests may be "
    "refused and logs cannot be put in order": (),
    "{SHARED_MEMORY} has {report.shared_memory_bytes / (1 << 20)} MiB: NCCL between this machine's GPUs may fail "
    "(NCCL_SHM_DISABLE=1 does without, slower; docker run --shm-size=8g gives more)": (
        "NCCL_SHM_DISABLE=1", "docker run --shm-size=8g"
    ),
    "{address} does not tell the time: {error}": (),
    "{lock} is {age_s / 60} minutes old: a build of DeepSpeed's extensions was killed, and the next one waits for it "
    "forever; delete it": (),
    "read the log above: what comes next hangs, or is very slow": (),
    "look at the logs of worker pool 2 (its image, its quota), or run without reducers (cluster.reduction_server: "
    "null)": ("cluster.reduction_server: null",),
    "the reducer {address} does not answer: {why}": (),
    "free space, choose another TMPDIR or output.root_uri, or give the machines a larger boot disk "
    "(cluster.boot_disk_size_gb)": ("TMPDIR", "output.root_uri", "cluster.boot_disk_size_gb"),
    "build the trainer image with REDUCTION_SERVER=1, or run without reducers (cluster.reduction_server: null)": (
        "REDUCTION_SERVER=1", "cluster.reduction_server: null"
    ),
    "install a CUDA build of torch": (),
    "install the package that it belongs to again": (),
    "run without reducers (cluster.reduction_server: null), or use a plugin or an NCCL that fits the other": (
        "cluster.reduction_server: null",
    ),
    # ---- the doctor
    "correct {field}": (),
    "correct {need.fields[0]}": (),
    "try again": (),
    "{remedies.create_bucket}\nor correct {field}": (),
    "{remedies.grant_on_bucket}\nor correct {field}": (),
    "{remedies.create_bucket}\nor set gcp.location to the bucket's region": ("gcp.location",),
    "{remedies.grant_on_bucket}\nor set gcp.location to the bucket's region": ("gcp.location",),
    "set gcp.project": ("gcp.project",),
    "set gcp.project, or source env.sh and use make": ("gcp.project", "source env.sh and use make"),
    "correct gcp.project": ("gcp.project",),
    "give a folder, or an id such as Qwen/Qwen2.5-0.5B": (),
    "try again, or check the network and HF_ENDPOINT": ("HF_ENDPOINT",),
    "check the network and HF_ENDPOINT": ("HF_ENDPOINT",),
    "unset HF_HUB_OFFLINE": ("HF_HUB_OFFLINE",),
    "build and push it: make build builder=gcloud config=CONFIG": ("make build builder=gcloud config=CONFIG",),
    "{remedies.create_repository}\nthen build and push it: make build builder=gcloud config=CONFIG": (
        "make build builder=gcloud config=CONFIG",
    ),
    "build it for them: make build config=CONFIG does, on machines of any kind": ("make build config=CONFIG",),
    "set deploy.env.LD_LIBRARY_PATH: {':'.join((libraries, *lost))}": ("deploy.env.LD_LIBRARY_PATH",),
    "change gcp.location or cluster.machine_type": ("gcp.location", "cluster.machine_type"),
    "see whether the condition holds for the run, or grant without one:\n{fix}": (),
    "correct gcp.location, unless the region is newer than the client": ("gcp.location",),
    "wait until others are done, or raise it:\n{remedies.raise_quota}": (),
    # ---- what both take from elsewhere: the hub, secrets, Google's client
    "accept its terms at {constants.ENDPOINT}/{name} with the account of the token": (),
    "check the network and HF_ENDPOINT; a model that was downloaded before is read with HF_HUB_OFFLINE=1": (
        "HF_ENDPOINT", "HF_HUB_OFFLINE=1"
    ),
    "choose another model, or give a folder": (),
    "check HF_ENDPOINT and the network's proxy": ("HF_ENDPOINT",),
    "try again, or check the network's proxy": (),
    "try again in {wait[1] if wait else 300} seconds; with a token the hub allows more: set model.hub_token_secret or "
    "HF_TOKEN, or log in with hf auth login": HF_TOKEN,
    "choose one of {constants.ENDPOINT}/{name}/commits/main": (),
    "set model.hub_token_secret or HF_TOKEN, or log in with hf auth login": HF_TOKEN,
    "correct the id; for a private model set model.hub_token_secret or HF_TOKEN, or log in with hf auth login": (
        HF_TOKEN
    ),
    "give a model in transformers' format": (),
    "renew the token with hf auth login, or correct HF_TOKEN or model.hub_token_secret": HF_TOKEN,
    "download it once, or give a folder; a run asks the hub": (),
    "unset it, or give a folder": (),
    "correct secrets.{variable} or the role; on your own machine, {variable} in the environment will do": (
        "secrets.{variable}",
    ),
    "check network, proxy (HTTPS_PROXY) and gcp.location, then try again": ("HTTPS_PROXY", "gcp.location"),
    "correct gcp.project and gcp.location": ("gcp.project", "gcp.location"),
    "correct the field in the run file": (),
    "gcloud projects add-iam-policy-binding {place.project} --member=user:YOUR_ACCOUNT --role={role}\nor correct the "
    f"project, or log in with another account: {LOGIN}": (
        "gcloud projects add-iam-policy-binding {place.project} --member=user:YOUR_ACCOUNT --role={role}",
        LOGIN,
    ),
    "gcloud services enable {product.api} --project {place.project}": (
        "gcloud services enable {product.api} --project {place.project}",
    ),
    "submit again: a new name is drawn": (),
    "wait for other runs to end, or ask for more under IAM & Admin > Quotas in the console": (),
    f"{LOGIN}\nor point GOOGLE_APPLICATION_CREDENTIALS at a service account's key file": (
        LOGIN, "GOOGLE_APPLICATION_CREDENTIALS"
    ),
}  # fmt: skip
# Variables, and who reads them: a file of ours, or a library by its documentation.
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "trainer/preflight/devices.py",
    "TMPDIR": "Python's tempfile",
    "LD_LIBRARY_PATH": "container/trainer.Dockerfile",
    "NCCL_SHM_DISABLE": "NCCL's environment variables",
    "REDUCTION_SERVER": "container/build.sh",
    "HF_ENDPOINT": "huggingface_hub's environment variables",
    "HF_HUB_OFFLINE": "huggingface_hub's environment variables",
    "HF_TOKEN": "huggingface_hub's environment variables",
    "HTTPS_PROXY": "requests",
    "GOOGLE_APPLICATION_CREDENTIALS": "google.auth",
}
# In the place of what a program puts in.
VALUES = {
    "{variable}": "TOKEN", "{count}": "1", "{place.project}": "my-project", "{role}": "roles/aiplatform.user",
    "{product.api}": "aiplatform.googleapis.com",
}  # fmt: skip
# What a remedy's text has beside words: commands, options, fields, variables, paths.
CODE = re.compile(
    r"\b(make|gcloud|bq|docker|python|(?<!of )vlmpipe|hf|kubectl) [a-z]|--\w|\w=\w|\b[a-z]+\.[a-z_]+\b|[A-Z]+_[A-Z]"
    r"|(?<![\w}])/\w"
)
VALUE = re.compile(r"\{[^{}]*(\{[^{}]*\}[^{}]*)*\}")
COMMAND = re.compile(r"\{remedies\.(\w+)\}")


def found() -> dict[str, Path]:
    return {text: path for path in MODULES for text in remedies_of(path)}


def test_every_remedy_is_in_the_table_and_the_table_has_no_other() -> None:
    there = {text: str(path) for text, path in found().items() if not COMMAND.fullmatch(text)}
    assert {text: path for text, path in there.items() if text not in TABLE} == {}
    assert TABLE.keys() - there.keys() == set(), "no module prints these any more"


@pytest.mark.parametrize("text", TABLE)
def test_what_a_remedy_names_is_tried_and_the_rest_is_words(text: str) -> None:
    rest = text
    for thing in TABLE[text]:
        assert thing in text
        rest = rest.replace(thing, "it")
    untried = CODE.search(VALUE.sub("it", rest))
    assert not untried, f"nothing tries {untried[0]} of it"


THINGS = sorted({thing for things in TABLE.values() for thing in things})


@pytest.mark.parametrize("thing", THINGS)
def test_what_a_remedy_names_exists(thing: str) -> None:
    trial = next((trial for pattern, trial in TRIALS.items() if re.match(pattern, thing)), None)
    assert trial, "nothing here tries it"
    for value, example in VALUES.items():
        thing = thing.replace(value, example)
    trial(thing)


def make(command: str) -> None:
    """make itself expands the command, and each variable on its command line is one that something reads."""
    words = command.split()
    done = subprocess.run([words[0], "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    read = (ROOT / "Makefile").read_text() + (ROOT / "container/build.sh").read_text()
    for name in (word.partition("=")[0] for word in words if "=" in word):
        assert re.search(rf"\$[({{]{name}\b", read), f"nothing reads {name}"


def google(command: str) -> None:
    with FakeGoogle("my-project") as there:
        there.run(command)


def script(command: str) -> None:
    _, path, *words = command.split()
    source = (ROOT / path).read_text()
    assert all(f'"{word}"' in source for word in words if word.startswith("--"))


def hub(command: str) -> None:
    from huggingface_hub.cli.hf import app

    context = app.make_context("hf", (words := command.split()[1:]), resilient_parsing=True)
    for word in words:
        app = app.get_command(context, word)
        assert app, f"hf has no command {word}"


def env_sh(_: str) -> None:
    assert "-include env.sh" in (ROOT / "Makefile").read_text() and (ROOT / "env.sh.example").exists()


def path(name: str) -> None:
    assert name in (ROOT / "container/trainer.Dockerfile").read_text() or Path(name).is_dir()


def tool(name: str) -> None:
    """NVIDIA's tools are where the image's PATH looks."""
    assert "/usr/local/nvidia/bin" in (ROOT / "container/trainer.Dockerfile").read_text(), name


def docker(command: str) -> None:
    assert command == "docker run --shm-size=8g", "no Docker here: its reference has this option, and no other was read"


def variable(text: str) -> None:
    name = text.partition("=")[0]
    reader = VARIABLES[name]
    assert "/" not in reader or name in (ROOT / reader).read_text()


def run_file_field(text: str) -> None:
    """A field of the run file; with a value, one that it takes."""
    name, separator, value = re.split(r"(=|: )", f"{text}", maxsplit=1) if re.search("=|: ", text) else (text, "", "")
    if separator:
        load_run_file(ROOT / "configs/digits.yaml", [f"{name}={value}"])
        return
    reference = (ROOT / "docs/reference/run-file.md").read_text()
    parents = [name, name.rpartition(".")[0]]  # of a map, such as deploy.env
    assert any(f"| `{one}` |" in reference for one in parents if one), name


TRIALS: dict[str, Callable[[str], None]] = {
    r"make( |$)": make,
    r"source env.sh": env_sh,
    r"gcloud |bq ": google,
    r"python ": script,
    r"hf ": hub,
    r"docker ": docker,
    r"nvidia-": tool,
    r"/": path,
    r"[A-Z_]+(=|$)": variable,
    r"[a-z_.]+": run_file_field,
}


EXAMPLES: dict[str, tuple[str, ...]] = {
    "enable": ("my-project", "storage.googleapis.com", "iam.googleapis.com"),
    "grant_on_project": ("my-project", "user:YOUR_ACCOUNT", "roles/logging.viewer"),
    "grant_on_account": ("a@my-project.iam.gserviceaccount.com", "user:YOUR_ACCOUNT", "roles/iam.serviceAccountUser"),
    "grant_on_bucket": ("bucket", "user:YOUR_ACCOUNT", "roles/storage.objectViewer"),
    "grant_on_secret": ("projects/my-project/secrets/s", "user:YOUR_ACCOUNT", "roles/secretmanager.secretAccessor"),
    "grant_on_table": ("p.dataset.table", "user:YOUR_ACCOUNT", "roles/bigquery.dataViewer"),
    "grant_on_repository": ("us-central1", "my-project", "images", "user:YOUR_ACCOUNT"),
    "create_bucket": ("bucket", "my-project", "us-central1"),
    "create_repository": ("us-central1", "my-project", "new"),
    "charge": ("my-project",),
    "create_account": ("new@my-project.iam.gserviceaccount.com",),
    "raise_quota": ("my-project", "aiplatform.googleapis.com/custom_model_training_cpus", "us-central1", "8"),
}


def test_every_command_of_the_doctor_has_an_example() -> None:
    public = {name for name, one in inspect.getmembers(remedies, inspect.isfunction) if not name.startswith("_")}
    assert public - {"member"} == EXAMPLES.keys()
    named = {name for text in found() for name in COMMAND.findall(text)}
    assert named == EXAMPLES.keys(), "a command that nothing prints, or one that is printed without an example"


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_command_of_the_doctor_is_one_that_the_tool_takes(name: str) -> None:
    with FakeGoogle("my-project") as there:
        before = state(there)
        there.run(getattr(remedies, name)(*EXAMPLES[name]))
        assert state(there) != before, "it changes something"


def state(google: FakeGoogle) -> str:
    named = (google.buckets, google.accounts, google.enabled, google.limits, google.repositories, google.charged)
    return str((dict(google.policies), *named))


@pytest.mark.parametrize(
    "command",
    [
        "gcloud storage buckets create gs://b --location=us-central1 --region=us-central1 --project=p",
        "gcloud storage buckets create gs://b",
        "gcloud secrets add-iam-policy-binding s --member=user:a --project=p",
        "gcloud secrets add-iam-policy-binding s t --member=user:a --role=roles/logging.viewer --project=p",
        "gcloud iam service-accounts create a --project=",
        "gcloud storage bucket create gs://b --project=p",
    ],
)
def test_commands_that_the_tools_would_refuse_are_refused_here(command: str) -> None:
    with FakeGoogle("p") as there, pytest.raises(AssertionError):
        there.run(command)


def test_the_collector_finds_what_a_module_may_print(tmp_path: Path) -> None:
    module = tmp_path / "doctor" / "module.py"
    module.parent.mkdir()
    module.write_text(
        "SHARED = 'do this'\n"
        "def one(x):\n"
        "    why, fix = 'a', 'b {x}'\n"
        "    if x:\n"
        "        fix = f'c {x.y} {SHARED}'\n"
        "    return missing('s', why, fix if x else other(x))\n"
        "def other(x):\n"
        "    return remedies.enable(x) + '\\nor d'\n"
        "def two(error):\n"
        "    raise UserError('x', fix=error.fix)\n"
    )
    assert remedies_of(module) == {"b {x}", "c {x.y} do this", "{remedies.enable}\nor d"}
