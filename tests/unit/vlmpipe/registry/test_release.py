"""From an evaluated run to a registered model, over the files of a real run folder; and the model card."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.support.reports import RUN_ID, make_run, write_export, write_json
from vlmpipe.registry.folder import FolderRegistry, overtaken
from vlmpipe.registry.release import MAX_RACES, decide_run, register_run, was_accepted
from vlmpipe.trainer.checkpoint.resume_rules import settings_of
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import write_description
from vlmpipe.trainer.storage.file_sums import FileSum
from vlmpipe.trainer.storage.records import read_record_file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An evaluated run with an export, neither decided nor registered."""
    run = make_run(tmp_path)
    (run / "decision.json").unlink()
    (run / "registered.json").unlink()
    write_export(run)
    return run


def edit(path: Path, **changes: Any) -> None:
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})


def another(run: Path, run_id: str, **evaluation: Any) -> Path:
    """A second run beside `run`, with other results on the same validation questions."""
    other = run.parent / run_id
    write_export(other)
    for name in ("run.json", "evaluate.json", "summary.json", "prepared.json"):
        (other / name).write_text((run / name).read_text())
    edit(other / "run.json", run={"run_id": run_id, "root_uri": str(run.parents[1])})
    edit(other / "evaluate.json", **evaluation)
    _answered(other / "predictions.jsonl", json.loads((other / "evaluate.json").read_text())["exact_match"], run)
    return other


def _answered(path: Path, share: float, run: Path) -> None:
    """The run's questions, of which this share is answered right."""
    lines = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    right = round(share * len(lines))
    path.write_text("".join(json.dumps(line | {"correct": n < right}) + "\n" for n, line in enumerate(lines)))


def test_an_accepted_run_becomes_the_champion(run: Path, tmp_path: Path) -> None:
    decision = decide_run(str(run))
    assert decision.accepted
    assert json.loads((run / "decision.json").read_text())["accepted"] is True
    entry = register_run(str(run))
    champion = FolderRegistry(f"{tmp_path}/registry").champion("digits")
    assert champion == entry
    assert (entry.version, entry.run_id, entry.data_fingerprint) == (1, RUN_ID, "f3a9c1d2")
    registered = read_record_file(run / "registered.json")
    assert registered == {"model": "digits", "version": 1, "uri": entry.model_uri, "alias": "champion"}
    assert register_run(str(run)) == entry  # a repeated step changes nothing


def test_quantized_exports_are_registered_with_the_model_if_they_were_accepted(run: Path) -> None:
    scores = {"questions": 100, "before": 0.9, "after": 0.9, "interval": [0, 0], "layers": 14, "left": ["visual"]}
    kept = scores | {"accepted": True, "same": 99, "group_size": 128}
    edit(run / "evaluate.json", quantized={"int4": kept, "fp8": scores | {"same": 1}})
    decide_run(str(run))
    with pytest.raises(DataError, match="export-int4"):
        register_run(str(run))
    (run / "export-int4").mkdir()
    (run / "export-int4/config.json").write_text('{"quantization_config": {}}')
    files = {"config.json": asdict(FileSum.of(run / "export-int4/config.json"))}
    write_description(open_storage(str(run)), {"quantized": "int4", "files": files}, "export-int4")
    entry = register_run(str(run))
    assert entry.quantized == {"int4": f"{entry.model_uri}-int4"}
    assert read_record_file(run / "registered.json")["quantized"] == entry.quantized
    copy = Path(entry.quantized["int4"])
    assert (copy / "config.json").read_bytes() == (run / "export-int4/config.json").read_bytes()
    row = "| int4 | 14 layers of the language model | 128 inputs of an output | visual, embeddings | 99 of 100 |"
    for folder in (copy, Path(entry.model_uri)):
        assert row in (folder / "README.md").read_text() and "| fp8 |" not in (folder / "README.md").read_text()


def test_a_version_that_was_registered_before_stays_without_a_quantized_export(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decide_run(str(run))
    register_run(str(run))
    edit(run / "evaluate.json", quantized={"int4": {"questions": 1, "same": 1, "accepted": True}})
    (run / "export-int4").mkdir()
    write_description(open_storage(str(run)), {"quantized": "int4", "files": {}}, "export-int4")
    assert not register_run(str(run)).quantized
    assert "version 1 of digits was registered without its int4 export" in capsys.readouterr().err


def test_the_registered_checkpoint_is_the_exported_one(run: Path) -> None:
    """By its name, a later evaluation finds the champion; with checkpoint.export best it is not the newest one."""
    edit(run / "summary.json", checkpoint="0005-00000420-9f3c2a", best_checkpoint="0005-00000400-9f3c2a")
    assert decide_run(str(run)).accepted
    assert register_run(str(run)).checkpoint == "0005-00000400-9f3c2a"
    assert "is this very run" in decide_run(str(run)).reason


def test_a_worse_run_is_rejected_and_cannot_be_registered(run: Path) -> None:
    decide_run(str(run))
    register_run(str(run))
    worse = another(run, "second", exact_match=0.6)
    decision = decide_run(str(worse))
    assert not decision.accepted
    assert "does not rule out a drop of" in decision.reason
    assert decision.champion is not None
    assert decision.champion.version == 1
    with pytest.raises(ConfigError, match="was not accepted"):
        register_run(str(worse))


def test_only_an_accepted_whole_model_of_the_very_settings_is_known_to_be_accepted(run: Path) -> None:
    assert not was_accepted(str(run)), "not decided yet"
    decide_run(str(run))
    assert was_accepted(str(run))
    settings = (run / "run.json").read_text()
    for section in ({"seed": 9}, {"resume": "never"}):
        edit(run / "run.json", train=json.loads(settings)["train"] | section)
        assert not was_accepted(str(run)), section
    (run / "run.json").write_text(settings)
    assert was_accepted(str(run))
    edit(run / "run.json", run=json.loads(settings)["run"] | {"submission": "the next"})
    assert was_accepted(str(run)), "it has no part in the settings"
    (run / "export/config.json").write_text("[]")
    assert not was_accepted(str(run)), "the export is damaged"


def test_an_accepted_run_is_known_to_be_accepted_after_a_move(run: Path, tmp_path: Path) -> None:
    root = run.parents[1]
    edit(run / "run.json", run={"run_id": run.name, "root_uri": str(root)})
    decide_run(str(run))
    assert was_accepted(str(run))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (root / "runs").rename(moved / "runs")
    moved_run = moved / "runs" / run.name
    assert was_accepted(str(moved_run))
    # What its next start writes there.
    edit(moved_run / "run.json", run={"run_id": run.name, "root_uri": str(moved)}, output={"root_uri": str(moved)})
    assert was_accepted(str(moved_run))


def test_a_rejected_run_is_not_known_to_be_accepted(run: Path) -> None:
    edit(run / "run.json", gate={"min_exact_match": 1.0})
    assert not decide_run(str(run)).accepted
    assert not was_accepted(str(run))


def test_other_held_out_questions_are_not_compared(run: Path) -> None:
    decide_run(str(run))
    register_run(str(run))
    second = another(run, "second", exact_match=0.95)
    assert decide_run(str(second)).accepted
    lines = (second / "predictions.jsonl").read_text().splitlines()
    (second / "predictions.jsonl").write_text("".join(f"{line}\n" for line in lines[: len(lines) // 3]))
    decision = decide_run(str(second))
    assert not decision.accepted, "no alias moves where the questions differ"
    assert "has left no answers to at least half of its questions" in decision.reason


def test_a_champion_that_changed_since_the_decision_is_not_replaced_unseen(run: Path, tmp_path: Path) -> None:
    slow, fast = another(run, "slow", exact_match=0.9), another(run, "fast", exact_match=0.95)
    decide_run(str(slow))
    decide_run(str(fast))
    register_run(str(fast))
    with pytest.raises(UserError, match="became champion since the decision, and compared with it: Rejected") as caught:
        register_run(str(slow))
    assert caught.value.code == ExitCode.REJECTED
    assert [entry.run_id for entry in FolderRegistry(f"{tmp_path}/registry").versions("digits")] == ["fast"]
    champion = FolderRegistry(f"{tmp_path}/registry").champion("digits")
    assert champion is not None
    assert champion.run_id == "fast"
    assert not decide_run(str(slow)).accepted  # deciding again compares with the new champion


@pytest.mark.parametrize("gate", [{}, {"max_regression": None}])
def test_a_run_that_is_accepted_beside_the_new_champion_takes_its_place(
    run: Path, tmp_path: Path, gate: dict[str, Any]
) -> None:
    edit(run / "run.json", gate=gate)
    slow, fast = another(run, "slow", exact_match=0.97), another(run, "fast", exact_match=0.95)
    decide_run(str(slow))
    decide_run(str(fast))
    register_run(str(fast))
    entry = register_run(str(slow))
    assert FolderRegistry(f"{tmp_path}/registry").champion("digits") == entry and entry.run_id == "slow"
    decision = read_record_file(slow / "decision.json")
    assert decision["accepted"] and decision["champion"]["run_id"] == "fast", "the decision on record is the last"


def test_a_champion_that_changes_while_files_are_copied_is_compared_with(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast run is promoted between the slow one's copy and its promotion."""
    slow, fast = another(run, "slow", exact_match=0.97), another(run, "fast", exact_match=0.95)
    decide_run(str(slow))
    decide_run(str(fast))
    promote = FolderRegistry.promote

    def late(self: FolderRegistry, model: str, version: int, *, instead_of: int | None) -> None:
        monkeypatch.setattr(FolderRegistry, "promote", promote)
        register_run(str(fast))
        promote(self, model, version, instead_of=instead_of)

    monkeypatch.setattr(FolderRegistry, "promote", late)
    assert register_run(str(slow)).version == 1
    champion = FolderRegistry(f"{tmp_path}/registry").champion("digits")
    assert champion is not None and champion.run_id == "slow"


def test_a_race_without_an_end_is_ended(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def never(self: FolderRegistry, model: str, version: int, *, instead_of: int | None) -> None:
        tries.append(version)
        raise overtaken("champion", model, 7, version, instead_of)

    monkeypatch.setattr(FolderRegistry, "promote", never)
    decide_run(str(run))
    with pytest.raises(UserError, match="another run was faster") as caught:
        register_run(str(run))
    assert caught.value.code == ExitCode.PREEMPTED and len(tries) == MAX_RACES


def test_deciding_about_the_champion_itself_is_refused(run: Path) -> None:
    decide_run(str(run))
    register_run(str(run))
    assert "is this very run" in decide_run(str(run)).reason


def test_a_run_that_has_trained_on_is_not_compared_with_what_it_was_and_gets_a_version(run: Path) -> None:
    decide_run(str(run))
    register_run(str(run))
    trained_on = {"checkpoint": "0001-00000020-bb"}
    edit(run / "summary.json", **trained_on)
    write_description(open_storage(str(run)), read_record_file(run / "export/vlmpipe.json") | trained_on)
    assert "an earlier checkpoint of this run" in decide_run(str(run)).reason
    settings = json.loads((run / "run.json").read_text())
    edit(run / "run.json", gate={**settings["gate"], "when_not_comparable": "skip"})
    assert decide_run(str(run)).accepted
    assert register_run(str(run)).version == 2


@pytest.mark.parametrize("name", ["evaluate.json", "run.json"])
def test_a_missing_file_names_the_step_that_writes_it(run: Path, name: str) -> None:
    (run / name).unlink()
    with pytest.raises(ConfigError, match=f"missing .*{name}, which the step .* writes"):
        decide_run(str(run))


def test_the_card_names_the_settings_of_the_training_and_not_of_a_later_run_file(run: Path) -> None:
    """A clone with another rate finds all steps made, and trains nothing."""
    job = JobConfig.load(str(run / "run.json"))
    edit(run / "summary.json", settings=settings_of(job))
    content = json.loads((run / "run.json").read_text())
    content["train"]["optimizer"] |= {"learning_rate": 0.5}
    content["train"] |= {"lr_schedule": "linear", "ema_decay": 0.9}
    write_json(run / "run.json", content)
    decide_run(str(run))
    card = Path(register_run(str(run)).model_uri, "README.md").read_text()
    rate = job.train.optimizer.learning_rate
    assert f"| Peak learning rate | {rate:g}, {job.train.lr_schedule} |" in card and "decay 0.9" not in card


def test_the_model_card_is_what_the_hub_reads(run: Path) -> None:
    decide_run(str(run))
    card = ModelCard.load(Path(register_run(str(run)).model_uri, "README.md"))
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "image-text-to-text"
    evaluation = json.loads((run / "evaluate.json").read_text())
    results = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert results == {"exact_match": evaluation["exact_match"], "loss": evaluation["loss"]}
    assert f"| **all** | 480 | {evaluation['exact_match']:.3f} |" in card.text
    weakest = min(evaluation["slices"], key=lambda name: evaluation["slices"][name]["exact_match"])
    assert f"Weakest slice: {weakest}" in card.text
    assert "`siglip_vision_model`, random initial weights" in card.text
    assert "AutoModelForImageTextToText.from_pretrained" in card.text


def test_a_hostile_slice_name_does_not_break_the_card_table(run: Path) -> None:
    edit(run / "evaluate.json", slices={"a|b\n# heading": {"questions": 1, "exact_match": 0.5, "chance": 0.1}})
    decide_run(str(run))
    text = Path(register_run(str(run)).model_uri, "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| a")]
    assert len(rows) == 1
    assert rows[0].startswith("| a\\|b \\# heading | 1 | 0.500 | 0.100 |")


def test_the_model_card_has_the_scores_of_benchmarks_with_their_intervals(run: Path) -> None:
    described = {"format": "pope", "questions": 3000, "scores": {"f1": 0.5}, "intervals": {"f1": [0.4, 0.6125]}}
    without = {"format": "lmms-eval", "questions": 24, "scores": {"pope_precision": 0.6}, "intervals": {}}
    edit(run / "evaluate.json", benchmarks={"pope-random": described, "pope": without})
    decide_run(str(run))
    text = Path(register_run(str(run)).model_uri, "README.md").read_text(encoding="utf-8")
    assert "| pope-random | pope | 3,000 | F1 | 0.500 (0.400 to 0.613) |" in text
    assert "| pope | lmms-eval | 24 | pope_precision | 0.600 |" in text


@pytest.mark.parametrize("name", ["config.json", "vlmpipe.json"])
def test_a_damaged_export_is_not_registered(run: Path, tmp_path: Path, name: str) -> None:
    decide_run(str(run))
    whole = (run / "export" / name).read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (run / "export" / name).write_bytes(damaged)
        with pytest.raises(DataError, match=f"{name} is damaged"):
            register_run(str(run))
    assert FolderRegistry(f"{tmp_path}/registry").champion("digits") is None


def test_an_export_with_a_file_more_or_less_is_not_registered(run: Path) -> None:
    decide_run(str(run))
    (run / "export/model-00002-of-00002.safetensors").write_bytes(b"another's")
    with pytest.raises(DataError, match=r"model-00002-of-00002.safetensors is damaged: vlmpipe.json does not list it"):
        register_run(str(run))
    (run / "export/model-00002-of-00002.safetensors").unlink()
    (run / "export/config.json").unlink()
    with pytest.raises(DataError, match=r"config.json is damaged: it is missing"):
        register_run(str(run))
