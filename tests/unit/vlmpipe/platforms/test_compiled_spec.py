from __future__ import annotations

import json

from vlmpipe.platforms.compiled_spec import compiled_root_uri, compiled_run_file, names_of_stages

RUN_FILE = {"name": "digits", "stages": [{"name": "align"}, {"name": "tune"}]}
SPEC = {
    "root": {
        "inputDefinitions": {"parameters": {"run_file": {"defaultValue": json.dumps(RUN_FILE)}}},
        "dag": {
            "tasks": {
                "notify": {"inputs": {"parameters": {"root_uri": {"runtimeValue": {"constant": "gs://bucket/out"}}}}}
            }
        },
    }
}


def test_run_file_stages_and_folder_are_read_from_the_spec() -> None:
    assert compiled_run_file(SPEC) == RUN_FILE
    assert names_of_stages(compiled_run_file(SPEC)) == ["align", "tune"]
    assert compiled_root_uri(SPEC) == "gs://bucket/out"


def test_pipeline_of_others_has_neither() -> None:
    spec = {"root": {"inputDefinitions": None, "dag": {"tasks": {"train": {}}}}}
    assert (compiled_run_file(spec), compiled_root_uri(spec), names_of_stages({})) == ({}, "", [""])
    assert compiled_run_file(None) == {}
