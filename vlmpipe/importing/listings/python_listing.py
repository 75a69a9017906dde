"""Job specs in Python: what a listing gives to Vertex AI's SDK, read from its syntax. Nothing of it is run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from vlmpipe.importing.listings.sdk_search import KIND, PARAMETERS, sent_search
from vlmpipe.job_spec.worker_pools import POOLS
from vlmpipe.trainer.errors import ConfigError

MAX_NODES = 20_000  # a name may stand for many values, which may stand for many again
MAX_DEPTH = 60
JOBS = ("CustomJob", "CustomContainerTrainingJob", "CustomTrainingJob", "CustomPythonPackageTrainingJob",
        "from_local_script", "HyperparameterTuningJob")  # fmt: skip
RUNS = ("run", "submit")
# Arguments of the SDK -> fields of the spec; those not named here are of a node, or unknown.
OF_THE_SPEC = ("service_account", "network", "tensorboard", "enable_web_access", "enable_dashboard_access",
               "reserved_ip_ranges", "experiment", "experiment_run", "persistent_resource_id",
               "psc_interface_config")  # fmt: skip
OF_SCHEDULING = {
    "timeout": "timeout",
    "restart_job_on_worker_restart": "restart_job_on_worker_restart",
    "disable_retries": "disable_retries",
    "max_wait_duration": "max_wait_duration",
    "scheduling_strategy": "strategy",
}
OF_THE_JOB = ("display_name", "labels", "project", "location", "staging_bucket", "study_spec", "max_trial_count",
              "parallel_trial_count", "max_failed_trial_count")  # fmt: skip
OF_A_MACHINE = ("machine_type", "accelerator_type", "accelerator_count")
OF_A_DISK = ("boot_disk_type", "boot_disk_size_gb")
REDUCER_IMAGE = "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
IGNORED = ("sync", "create_request_timeout")  # of the call, not of the job


@dataclass(frozen=True)
class Listing:
    """A job as the SDK would send it, and the parts of its arguments that are no plain values: path -> source text."""

    content: Mapping[str, object] | list[object]
    not_literal: Mapping[str, str]


class _NotLiteralError(Exception):
    """A value that only running the listing would give."""


@dataclass
class _Values:
    """Values of the listing's expressions, where its text says them."""

    names: dict[str, list[ast.expr]] = field(default_factory=dict)
    additions: dict[str, list[ast.expr]] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    not_literal: dict[str, str] = field(default_factory=dict)
    nodes: int = 0

    @classmethod
    def of(cls, tree: ast.Module) -> _Values:
        values = cls()
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                values.names.setdefault(node.targets[0].id, []).append(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                values.names.setdefault(node.target.id, []).append(node.value)
            elif isinstance(node, ast.FunctionDef):
                values.functions[node.name] = node
                defaults = zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)
                for argument, default in defaults:
                    values.names.setdefault(argument.arg, []).append(default)
            elif isinstance(node, ast.Call) and len(node.args) == 1:
                match node.func:
                    case ast.Attribute(value=ast.Name(id=name), attr="append"):
                        values.additions.setdefault(name, []).append(node.args[0])
        return values

    def read(self, node: ast.expr, path: str, depth: int = 0) -> object:
        """The value of an expression; parts that are no plain values are noted. Raises _NotLiteralError."""
        self.nodes += 1
        if self.nodes > MAX_NODES or depth > MAX_DEPTH:
            raise _NotLiteralError
        deeper = depth + 1
        match node:
            case ast.Constant(value=str() | int() | float() | bool() | None):
                return node.value
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return self._items(items, path, deeper)
            case ast.Dict():
                return self._mapping(node, path, deeper)
            case ast.Name(id=name):
                return self._name(name, path, deeper)
            case ast.JoinedStr(values=parts):
                return "".join(str(self.read(part, path, deeper)) for part in parts)
            case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
                return self.read(inner, path, deeper)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                first, second = self.read(left, path, deeper), self.read(right, path, deeper)
                if isinstance(first, str) and isinstance(second, str):
                    return first + second
                if isinstance(first, list) and isinstance(second, list):
                    return [*first, *second]
            case ast.Attribute(attr=name) if name.isupper():  # a name of an enum
                return name
            case ast.Call():
                return self._call(node, path, deeper)
        raise _NotLiteralError

    def _name(self, name: str, path: str, depth: int) -> object:
        known = self.names.get(name, [])
        if len(known) != 1:
            raise _NotLiteralError
        value = self.read(known[0], path, depth)
        if isinstance(value, list):
            return [*value, *self._items(self.additions.get(name, []), path, depth, start=len(value))]
        return value

    def _items(self, items: list[ast.expr], path: str, depth: int, start: int = 0) -> list[object]:
        literals: list[object] = []
        for item in items:
            here = f"{path}[{start + len(literals)}]"
            try:
                if isinstance(item, ast.Starred):
                    more = self.read(item.value, here, depth)
                    literals += more if isinstance(more, list) else []
                else:
                    literals.append(self.read(item, here, depth))
            except _NotLiteralError:
                self._note(here, item)
                if all(isinstance(other, str) for other in literals):  # a word of a command keeps its place
                    literals.append(f"<{ast.unparse(item)[:60]}>")
        return literals

    def _mapping(self, node: ast.Dict, path: str, depth: int) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            try:
                if key is None:
                    more = self.read(value, path, depth)
                    mapping |= more if isinstance(more, dict) else {}
                    continue
                name = str(self.read(key, path, depth))
            except _NotLiteralError:
                self._note(path, value if key is None else key)
                continue
            here = f"{path}.{name}" if path else name
            try:
                mapping[name] = self.read(value, here, depth)
            except _NotLiteralError:
                self._note(here, value)
        return mapping

    def _call(self, node: ast.Call, path: str, depth: int) -> object:
        """A function of the listing that returns plain values, or one of the SDK's types with keywords."""
        name = _called(node)
        if name in PARAMETERS:
            return self.keywords(node, path, depth, PARAMETERS[name]) | {KIND: name}
        function = self.functions.get(name)
        if isinstance(node.func, ast.Name) and function and not node.args and not node.keywords:
            returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
            if len(returns) == 1:
                return self.read(returns[0], path, depth)
        if name.endswith(("Spec", "EnvVar", "dict")) and not node.args:
            return self.keywords(node, path, depth)
        raise _NotLiteralError

    def keywords(self, node: ast.Call, path: str, depth: int = 0, positions: tuple[str, ...] = ()) -> dict[str, object]:
        """Keyword arguments of a call; others have the names of their `positions`."""
        arguments: dict[str, object] = {}
        named = [ast.keyword(name, value) for name, value in zip(positions, node.args, strict=False)]
        for keyword in [*named, *node.keywords]:
            here = f"{path}.{keyword.arg}" if path and keyword.arg else keyword.arg or path
            try:
                value = self.read(keyword.value, here, depth)
            except _NotLiteralError:
                self._note(here, keyword.value)
                continue
            if keyword.arg is None:
                arguments |= value if isinstance(value, dict) else {}
            else:
                arguments[keyword.arg] = value
        return arguments

    def _note(self, path: str, node: ast.expr) -> None:
        key = path
        while key in self.not_literal:
            key += "'"
        self.not_literal[key] = ast.unparse(node)[:200]


def read_listing(text: str, name: str) -> Listing:
    """The job of a listing. Raises ConfigError for text that is no Python, or that makes no job."""
    expected = "a listing with worker_pool_specs, or with CustomJob and its relatives of google-cloud-aiplatform"
    try:
        tree = ast.parse(text)
        values = _Values.of(tree)
        content = _job(tree, values) or _request(values) or _pools(values)
    except SyntaxError as error:
        raise ConfigError(f"{name} is no Python: {error.msg}, line {error.lineno}", expected=expected) from None
    except (RecursionError, MemoryError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot be read as Python: {error or type(error).__name__}", expected=expected
        ) from None
    if content is None:
        raise ConfigError(
            f"{name} is a Python program that makes no job",
            expected=expected,
            fix="a training program runs as train.trainer.command: vlmpipe docs bring-your-own-trainer; "
            "vlmpipe import --command 'torchrun ...' takes the command that starts it",
        )
    return Listing(content, values.not_literal)


def _called(node: ast.Call) -> str:
    return (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else node.func.id
        if isinstance(node.func, ast.Name)
        else ""
    )


def _request(values: _Values) -> dict[str, object] | None:
    """A job that the listing writes as the API takes it, in a dictionary that has a name."""
    for name, known in values.names.items():
        keys = [_text(key) for key in known[0].keys] if len(known) == 1 and isinstance(known[0], ast.Dict) else []
        if {"job_spec", "trial_job_spec"} & set(keys):
            content = values.read(ast.Name(name), "")
            return content if isinstance(content, dict) else None
    return None


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _pools(values: _Values) -> list[object] | None:
    """A list of worker pools that has a name."""
    for name, known in values.names.items():
        if "pool" in name.lower() and len(known) == 1 and isinstance(known[0], ast.List):
            pools = values.read(ast.Name(name), POOLS)
            if isinstance(pools, list) and any(isinstance(pool, dict) for pool in pools):
                return pools
    for function in values.functions.values():
        returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        if "pool" in function.name.lower() and len(returns) == 1 and isinstance(returns[0], ast.List):
            pools = values.read(returns[0], POOLS)
            return pools if isinstance(pools, list) else None
    return None


def _job(tree: ast.Module, values: _Values) -> dict[str, object] | None:
    """The first job that the listing makes, with the arguments of its run."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    makers = sorted((node for node in calls if _called(node) in JOBS), key=lambda node: (node.lineno, node.col_offset))
    if not makers:
        return None
    arguments: dict[str, object] = {}
    searches = [node for node in makers if _called(node) == "HyperparameterTuningJob"]
    job = next((node for node in makers if node not in searches), None)
    for node in (*searches[:1], *([job] if job else [])):
        arguments |= values.keywords(node, "")
        if node in searches:
            arguments.pop("custom_job", None)
            values.not_literal.pop("custom_job", None)
    for node in calls:
        if _called(node) in RUNS and isinstance(node.func, ast.Attribute) and node.keywords:
            arguments |= values.keywords(node, "")
    for extra in makers:
        if extra not in (job, *searches[:1]):
            values.not_literal[f"line {extra.lineno}"] = f"another job, {_called(extra)}: the first one is imported"
    kind = _called(job) if job else "CustomJob"
    return _sent(arguments, kind, "trial_job_spec" if searches else "job_spec")


def _sent(arguments: dict[str, object], kind: str, root: str) -> dict[str, object]:
    """The job that the SDK makes from its arguments."""
    fields = {name: value for name, value in arguments.items() if value is not None and name not in IGNORED}
    spec: dict[str, object] = {}
    if POOLS in fields:
        spec[POOLS] = fields.pop(POOLS)
    elif kind != "CustomJob":
        spec[POOLS] = _sdk_pools(fields, kind)
    for name in OF_THE_SPEC:
        if name in fields:
            spec[name] = fields.pop(name)
    scheduling = {target: fields.pop(name) for name, target in OF_SCHEDULING.items() if name in fields}
    if scheduling:
        spec["scheduling"] = scheduling
    if place := fields.pop("base_output_dir", None):
        spec["base_output_directory"] = {"output_uri_prefix": place}
    if key := fields.pop("encryption_spec_key_name", None):
        fields["encryption_spec"] = {"kms_key_name": key}
    if root == "trial_job_spec":
        fields = sent_search(fields)
    around = {name: fields.pop(name) for name in list(fields) if name in (*OF_THE_JOB, "encryption_spec")}
    return {**around, root: {**spec, **fields}}


def _sdk_pools(arguments: dict[str, object], kind: str) -> list[dict[str, object]]:
    """The pools that the SDK makes from single arguments: a chief, the other replicas as workers, reducers."""
    environment = arguments.pop("environment_variables", None)
    task: dict[str, object] = {}
    image = arguments.pop("container_uri", None)
    if kind == "CustomPythonPackageTrainingJob":
        names = {"python_package_gcs_uri": "package_uris", "python_module_name": "python_module"}
        task |= {target: arguments.pop(name) for name, target in names.items() if name in arguments}
        if isinstance(task.get("package_uris"), str):
            task["package_uris"] = [task["package_uris"]]
        task["executor_image_uri"] = image
    else:
        task["image_uri"] = image
        command, script = arguments.pop("command", None), arguments.pop("script_path", None)
        task["command"] = command or (["python", script] if script else None)
    words = arguments.pop("args", None) or None
    task["args"] = [str(word) for word in words] if isinstance(words, list) else words
    if isinstance(environment, dict):
        task["env"] = [{"name": name, "value": str(value)} for name, value in environment.items()]
    count = arguments.pop("replica_count", 1)
    pool: dict[str, object] = {
        "machine_spec": {name: arguments.pop(name) for name in OF_A_MACHINE if name in arguments},
        "disk_spec": {name: arguments.pop(name) for name in OF_A_DISK if name in arguments},
        "python_package_spec" if "executor_image_uri" in task else "container_spec": {
            name: value for name, value in task.items() if value is not None
        },
    }
    pool = {name: value for name, value in pool.items() if value}
    pools = [{**pool, "replica_count": 1}]
    if isinstance(count, int) and count > 1:
        pools.append({**pool, "replica_count": count - 1})
    reducers = arguments.pop("reduction_server_replica_count", 0)
    machine = arguments.pop("reduction_server_machine_type", None)
    container = arguments.pop("reduction_server_container_uri", REDUCER_IMAGE)
    if reducers and machine:
        pools.append({"machine_spec": {"machine_type": machine}, "replica_count": reducers,
                      "container_spec": {"image_uri": container}})  # fmt: skip
    return pools
