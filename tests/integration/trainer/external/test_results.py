"""What becomes of a program's result: an adapter is merged and evaluated, and a team's own evaluation is heard."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.support.trainer.checkpoints import record
from tests.support.trainer.external_runs import external_run
from tests.support.trainer.runs import make_run, run_ranks
from vlmpipe.components.runtime.run_results import sync_model
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.errors import ConfigError, ExitCode, UserError
from vlmpipe.trainer.external.base_model import write_base_model
from vlmpipe.trainer.external.checkpoints.states import SavedStates
from vlmpipe.trainer.external.evaluate import evaluate
from vlmpipe.trainer.external.result import require_result
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.records import read_record

JUDGE = """
import json, sys
from pathlib import Path
model, data, output = map(Path, sys.argv[1:4])
assert not list(data.iterdir()), "data_format is none"
files = sorted(path.name for path in model.iterdir())
if sys.argv[4] == "fails":
    raise SystemExit(3)
if sys.argv[4] != "silent":
    (output / "evaluate.json").write_text(sys.argv[4].replace("FILES", json.dumps(files)))
"""


def adapter(base: Path, folder: Path) -> dict[str, torch.Tensor]:
    """A trained adapter of the base in `folder`. Returns the weights of the model it makes."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForImageTextToText.from_pretrained(base, trust_remote_code=False)
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder)
    return {name: value.clone() for name, value in adapted.merge_and_unload().state_dict().items()}


def test_an_adapter_is_merged_into_the_base_and_evaluated(tmp_path: Path) -> None:
    trainer = {"name": "peft", "command": ["python", "train.py"], "result": "hf-adapter"}
    changes = {"train.trainer": trainer, "features": {"cache": "off"}, "evaluate.max_samples": 4}
    job = make_run(tmp_path, "adapter", changes, features="off")
    assert write_base_model(job, job.pointers().prepared_uri)
    base, output = Path(job.run.run_uri, "base"), tmp_path / "output"
    expected = adapter(base, output)
    assert job.train.trainer
    states = SavedStates(job, record(num_nodes=1), [])
    states.save_result(require_result(job.train.trainer, output, "llava"), 1, "hf-adapter")

    exported = sync_model(job)
    export = Path(job.run.run_uri, "export")
    assert not list(export.glob("adapter_*")) and {"model.safetensors", "tokenizer.json"} <= exported["files"].keys()
    merged = AutoModelForImageTextToText.from_pretrained(export, trust_remote_code=False).state_dict()
    assert merged.keys() == expected.keys()
    assert all(torch.allclose(merged[name], expected[name], atol=1e-6) for name in merged)
    first = AutoModelForImageTextToText.from_pretrained(base, trust_remote_code=False).state_dict()
    assert [name for name in merged if not torch.equal(merged[name], first[name])], "the adapter changes the base"

    run_ranks("vlmpipe.trainer.evaluation.evaluate", ["--config", f"{job.run.run_uri}/run.json"], processes=1)
    figures = read_record(open_storage(job.run.run_uri), "evaluate.json")
    assert math.isfinite(figures["loss"]) and 0 <= figures["exact_match"] <= 1


@pytest.fixture(scope="module")
def opaque(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    """A run with an exported result that only its own command can judge."""
    judge = ["python", "JUDGE", "{model}", "{data}", "{output}", "HOW"]
    run = external_run(tmp_path_factory.mktemp("opaque"), result="opaque", evaluate_command=judge)
    (run.root / "judge.py").write_text(JUDGE)
    code, text = run.launch()
    assert code == 0, text
    exported = sync_model(run.job)
    assert "training_args.bin" in exported["files"], "opaque files are kept as they are"
    return run.job


def judged(job: JobConfig, how: str) -> JobConfig:
    trainer = job.train.trainer
    assert trainer
    words = (trainer.evaluate_command[0], str(Path(job.run.root_uri, "judge.py")), *trainer.evaluate_command[2:-1], how)
    changed = trainer.model_copy(update={"evaluate_command": words})
    return job.model_copy(update={"train": job.train.model_copy(update={"trainer": changed})})


def test_the_figures_of_ones_own_evaluation_are_the_runs(opaque: JobConfig) -> None:
    evaluate(judged(opaque, '{"exact_match": 0.8, "questions": 30, "files": FILES}'))
    store = open_storage(opaque.run.run_uri)
    figures = read_record(store, "evaluate.json")
    assert (figures["exact_match"], figures["questions"]) == (0.8, 30)
    assert figures["files"] == ["config.json", "model.safetensors", "training_args.bin"]
    step = read_record(store, "steps/evaluate.json")
    assert step["state"] == "done" and "counter's own command: exact_match 0.8, questions 30" in step["message"]


@pytest.mark.parametrize(
    ("how", "code", "sentence"),
    [
        ("fails", ExitCode.UNEXPECTED, "ended with exit code 3"),
        ("silent", ExitCode.BAD_RESULT, "left no evaluate.json"),
        ("not json", ExitCode.BAD_RESULT, "left no evaluate.json that can be read"),
        ("[]", ExitCode.BAD_RESULT, "holds no figures"),
    ],
)
def test_an_evaluation_without_figures_is_a_failure(opaque: JobConfig, how: str, code: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        evaluate(judged(opaque, how))
    assert caught.value.code == code


def test_an_evaluation_that_is_not_there_is_a_wrong_setting(opaque: JobConfig) -> None:
    trainer = opaque.train.trainer
    assert trainer
    changed = trainer.model_copy(update={"evaluate_command": ("vlmpipe-no-such-program",)})
    job = opaque.model_copy(update={"train": opaque.train.model_copy(update={"trainer": changed})})
    with pytest.raises(ConfigError, match="vlmpipe-no-such-program cannot be started"):
        evaluate(job)
