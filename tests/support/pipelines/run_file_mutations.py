"""Run files with a few fields replaced, at random: by allowed values, by values next to a limit, and by nonsense."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

from vlmpipe.config.run_config import RunConfig

NONSENSE: tuple[Any, ...] = (
    None,
    "",
    "abc",
    -1,
    0,
    1.5,
    True,
    [],
    {},
    ["abc"],
    {"abc": 1},
    10**20,
    "\u202e",
    "${HOME}",
)
NUMBERS = (-1, 0, 1, 2, 3, 4, 7, 8, 16, 64, 100, 4096, 10**9)
SHARES = (-0.1, 0.0, 1e-9, 0.5, 1.0, 1.1, 1e300)
MODEL_TYPES = ("siglip_vision_model", "clip_vision_model", "dinov2", "vit", "qwen2", "llama", "gpt2", "bert", "nope")
# Texts whose meaning a schema does not say.
TEXTS: dict[str, tuple[Any, ...]] = {
    "name": ("a", "a-name", "Name", "x" * 70),
    "data.source": ("builtin:digits", "builtin:no", "/no/such/folder", "/dev/zero", "gs://bucket/a.json", "a.tar"),
    "data.image_folder": ("/no/such/folder", "gs://bucket/images", "."),
    "data.chat_template": ("", "native", "vlmpipe", "/no/such.jinja", "README.md", "gs://bucket/a.jinja"),
    "data.answer_end": ("", "</s>", "no such token"),
    "data.split_by": ("image", "record", "patient"),
    "model.tokenizer": ("train:300", "train:1", "train:256", "train:257", "train:x", "no/such", "/no/such", "gs://b/t"),
    "cluster.machine_type": (
        "n1-standard-4",
        "n1-standard-8",
        "a2-highgpu-1g",
        "g2-standard-8",
        "a3-highgpu-8g",
        "tpu",
    ),
    "cluster.accelerator_type": ("", "NVIDIA_TESLA_A100", "NVIDIA_L4", "NVIDIA_H100_80GB", "TPU_V5_LITEPOD"),
    "cluster.timeout": ("3600s", "604800s", "1h", "0s", "9999999s"),
    "cluster.max_wait_duration": ("3600s", "0s", "9999999s"),
    "gcp.location": ("us-central1", "europe-west4", "us-centrall1", "us-central1-a", "moon"),
    "gcp.project": ("my-project", "My Project", "p"),
    "gcp.pipeline_root": ("gs://bucket/root", "gs://", "/tmp/root", "s3://bucket"),
    "output.root_uri": ("runs", "gs://bucket/runs", "s3://bucket/runs", "file:///tmp/runs", "\0"),
    "register.registry": ("registry", "gs://bucket/registry", "vertex://model", "vertex://", "http://registry"),
    "plan.prices_file": ("/no/such/file", "/dev/zero", "prices.yaml"),
}
MODEL_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "patch_size", "image_size", "num_channels", "vocab_size", "max_position_embeddings", "head_dim",
)  # fmt: skip
BENCHMARK = {"name": "pope", "format": "pope", "uri": "/no/such/file", "images": "/no/such/folder"}
LISTS: dict[str, tuple[Any, ...]] = {
    "model.freeze": ([], ["tower"], ["tower", "projector", "language_model"], ["language_model"]),
    "model.freeze_parameters": ([], ["*"], ["tower.*"], ["no.such.*"]),
    "model.train_parameters": ([], ["*"], ["tower.*"], ["no.such.*"]),
    "model.lora": (
        None, {}, {"rank": 4}, {"targets": ["q_proj"]}, {"targets": ["no_such_layer"]}, {"targets": []},
        {"parts": ["projector"]}, {"parts": ["tower"]}, {"use_dora": True, "use_rslora": True}, {"export": "adapter"},
    ),
    "evaluate.controls": ([], ["shuffled_image"], ["no_such"]),
    "evaluate.benchmarks": ([], [BENCHMARK], [BENCHMARK, BENCHMARK], [{"format": "pope"}], ["pope"]),
    "gate.benchmarks": ({}, {"pope": {"f1": 0.5}}, {"pope": {"f1": "high"}}, {"nope": {}}, {"pope": 1}),
    "gate.min_scores": ({}, {"cider_d": 0.5}, {"no_such": 1}),
    "train.deepspeed": ({}, {"zero_optimization": {"reduce_bucket_size": 1}}, {"nonsense": 1}),
    "cluster.capacity_fallback": ([], [{"scheduling_strategy": "spot"}, {"scheduling_strategy": "standard"}]),
    "cluster.reduction_server": (None, {}, {"replica_count": 2}, {"replica_count": 2, "machine_type": "n1-highcpu-16"}),
    "tune": (None, {}, {"parameters": {}}),
    "schedule": (None, {"cron": "0 3 * * *"}, {"cron": "nonsense"}),
}  # fmt: skip


def _leaves(schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> Iterator[tuple[str, list[Any]]]:
    """Dotted paths of all fields below `schema`, each with values to try."""
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        for one in _alternatives(field, definitions):
            if "properties" in one:
                yield from _leaves(one, definitions, here)
            else:
                yield here, _values(here, one)


def _alternatives(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "$ref" in field:
        yield from _alternatives(definitions[field["$ref"].rsplit("/", 1)[-1]], definitions)
    elif "anyOf" in field or "oneOf" in field:
        for one in field.get("anyOf", field.get("oneOf", ())):
            yield from _alternatives(one, definitions)
    else:
        yield field


def _values(path: str, field: Mapping[str, Any]) -> list[Any]:
    if found := TEXTS.get(path) or LISTS.get(path):
        return list(found)
    if "enum" in field:
        return list(field["enum"])
    if "const" in field:
        return [field["const"]]
    by_type: dict[str, tuple[Any, ...]] = {"integer": NUMBERS, "number": (*NUMBERS, *SHARES), "boolean": (True, False)}
    return list(by_type.get(field.get("type", ""), NONSENSE))


def _fields() -> dict[str, list[Any]]:
    schema = RunConfig.model_json_schema(by_alias=True)
    found: dict[str, list[Any]] = {}
    for path, values in _leaves(schema, schema["$defs"], ""):
        found.setdefault(path, []).extend(values)
    for path, values in LISTS.items():
        found.setdefault(path, list(values))
    for part in ("model.tower.config", "model.language_model.config"):
        found[f"{part}.model_type"] = list(MODEL_TYPES)
        found |= {f"{part}.{size}": [*NUMBERS, "abc", None] for size in MODEL_SIZES}
    return {path: values for path, values in found.items() if "*" not in path}


FIELDS = _fields()


def mutated(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with dotted fields replaced. A field below one that is no section any more is left out."""
    result: dict[str, Any] = copy.deepcopy(dict(content))
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        section: Any = result
        for part in path:
            section = section.setdefault(part, {}) if isinstance(section, dict) else None
            section = {} if section is None else section
        if isinstance(section, dict):
            section[last] = copy.deepcopy(value)
    return result


@st.composite
def changes(draw: st.DrawFn, sections: tuple[str, ...] = ()) -> dict[str, Any]:
    """One to three fields, of all sections or of these, with a value each; one in eight is nonsense."""
    known = [path for path in sorted(FIELDS) if not sections or path.split(".")[0] in sections]
    paths = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
    found = {}
    for path in paths:
        values = NONSENSE if draw(st.integers(0, 7)) == 7 else FIELDS[path]
        found[path] = draw(st.sampled_from(values))
    return found
