"""Where a later stage takes its weights, its tokenizer and its format from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.tiny_native import model_section
from tests.support.trainer.tiny_runs import TINY, merged
from vlmpipe.components.runtime.stage_start import continued
from vlmpipe.config.run_config import RunConfig
from vlmpipe.records.stage_folders import stage_run_id
from vlmpipe.trainer.config.job import JobConfig, RunPaths
from vlmpipe.trainer.data.prepare.fingerprint import fingerprint
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import join_uri
from vlmpipe.trainer.storage.export_manifest import NAME, write_description
from vlmpipe.trainer.storage.records import write_record, write_run_file

STAGES = [
    {"name": "align", "freeze": ["tower", "language_model"]},
    {"name": "language", "freeze": ["tower", "projector"]},
    {"name": "all", "freeze": [], "features": {"cache": "off"}},
]


class Stages:
    """The stages of a run file before the one called `begin` have left what the pipeline's steps leave."""

    def __init__(self, root: Path, changes: dict[str, Any], stages: list[dict[str, Any]] = STAGES) -> None:
        self.config = RunConfig.model_validate(merged(TINY, changes) | {"stages": stages})
        self.runs = self.config.stage_runs()
        names = list(self.runs)
        self.paths = {name: RunPaths(run_id=stage_run_id("r1", name, names), root_uri=str(root)) for name in self.runs}

    def begin(self, stage: str) -> RunConfig:
        before: list[tuple[RunConfig, RunPaths]] = []
        for name, run in self.runs.items():
            started = continued(run, self.paths[name], before) if before else run
            if name == stage:
                return started
            self.finish(name, started)
            before.append((run, self.paths[name]))
        raise AssertionError(stage)

    def finish(self, name: str, started: RunConfig) -> None:
        paths = self.paths[name]
        store = open_storage(paths.run_uri)
        write_record(store, "run.json", started.to_run_json(paths))
        prepared = join_uri(paths.prepared_root, fingerprint(JobConfig.model_validate(started.to_run_json(paths))))
        pointers = {"prepared_uri": prepared, "features_uri": "", "features": "off"}
        write_record(store, "prepared.json", pointers)
        write_description(store, {"files": {}})

    def export(self, name: str) -> str:
        return join_uri(self.paths[name].run_uri, "export")


def sources(config: RunConfig) -> dict[str, str]:
    return {name: part.weights if part else "new" for name, part in config.model.sources.items()}


def test_what_was_trained_comes_from_the_stage_before_and_the_rest_stays_where_it_is(tmp_path: Path) -> None:
    stages = Stages(tmp_path, {})
    assert sources(stages.begin("align")) == {"tower": "", "projector": "new", "language_model": ""}
    one, two = stages.export("align"), stages.export("language")
    assert one != two
    assert sources(stages.begin("language")) == {"tower": "", "projector": one, "language_model": ""}
    last = stages.begin("all")
    assert sources(last) == {"tower": "", "projector": two, "language_model": two}
    assert last.model.freeze == () and last.model.tower == stages.config.model.tower


def test_thawed_parameters_of_a_frozen_part_come_from_the_export(tmp_path: Path) -> None:
    thawing = {**STAGES[0], "model": {"train_parameters": ["*vision_tower*"]}, "features": {"cache": "off"}}
    stages = Stages(tmp_path, {}, [thawing, STAGES[1]])
    assert set(sources(stages.begin("language")).values()) == {stages.export("align")}


def test_weights_in_buckets_keep_the_revision_that_the_first_stage_found(tmp_path: Path) -> None:
    stages = Stages(tmp_path, {})
    stages.begin("language")
    store = open_storage(stages.paths["align"].run_uri)
    written = json.loads(store.read("run.json"))
    written["model"]["tower"] = {"weights": "gs://bucket/tower", "revision": "a" * 16}
    write_record(store, "run.json", {key: one for key, one in written.items() if key != "record_crc32c"})
    before = [(stages.runs["align"], stages.paths["align"])]
    started = continued(stages.runs["language"], stages.paths["language"], before)
    assert started.model.tower.revision == "a" * 16


@pytest.mark.parametrize(("data", "is_shared"), [({}, True), ({"max_samples": 30}, False)])
def test_a_trained_tokenizer_is_trained_again_on_the_same_data_only(
    data: dict[str, Any], is_shared: bool, tmp_path: Path
) -> None:
    stages = Stages(tmp_path, {}, [STAGES[0], {**STAGES[1], "data": data}])
    started = stages.begin("language")
    assert started.model.tokenizer == ("train:300" if is_shared else stages.export("align"))
    assert started.data.chat_format(started.model) == "vlmpipe"


def test_a_moved_run_that_is_started_again_keeps_its_tokenizer(tmp_path: Path) -> None:
    assert Stages(tmp_path / "a", {}).begin("language").model.tokenizer == "train:300"
    stages = Stages((tmp_path / "a").rename(tmp_path / "b"), {})
    first, paths = stages.runs["align"], stages.paths["align"]
    write_run_file(open_storage(paths.run_uri), first.to_run_json(paths))  # nothing else of a finished stage runs
    assert continued(stages.runs["language"], stages.paths["language"], [(first, paths)]).model.tokenizer == "train:300"


def test_a_model_as_a_whole_comes_from_the_export_and_is_asked_as_before(tmp_path: Path) -> None:
    stages = Stages(tmp_path, {"model": model_section("qwen3_vl", tokenizer=str(tmp_path))}, STAGES[:2])
    started = stages.begin("language")
    assert sources(started) == {"pretrained": stages.export("align")}
    assert started.data.chat_format(started.model) == stages.config.data.chat_format(stages.config.model) == "vlmpipe"


def test_without_the_export_of_the_stage_before_nothing_starts(tmp_path: Path) -> None:
    stages = Stages(tmp_path, {})
    stages.begin("language")
    open_storage(stages.paths["align"].run_uri).delete(NAME)
    before = [(stages.runs["align"], stages.paths["align"])]
    with pytest.raises(ConfigError, match=r"there is no model in .*stages/align/export"):
        continued(stages.runs["language"], stages.paths["language"], before)
