"""`train.trainer`: what it needs is asked for, and placeholders are filled in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vlmpipe.trainer.config.external_trainer import PLACEHOLDERS, ExternalTrainerConfig, fill_in


def trainer(**changes: Any) -> ExternalTrainerConfig:
    return ExternalTrainerConfig.model_validate({"name": "plain", "command": ["python", "train.py"]} | changes)


PACKAGE = {
    "kind": "package", "package_uris": ["gs://b/a.tar.gz"], "executor_image_uri": "image", "python_module": "a.task",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"command": []}, "kind command needs the program"),
        ({"command": ["a", "{sed}"]}, r"unknown placeholder \{sed\}: did you mean \{seed\}"),
        ({"evaluate_command": ["a", "{outputs}"]}, r"did you mean \{output\}"),
        ({"command": ["a", "{resume}"]}, "put it into resume_args"),
        ({"command": ["llamafactory-cli", "train"]}, "starts processes itself: use launch self"),
        ({"command": ["python", "-m", "torch.distributed.run", "a.py"]}, "starts processes itself: use launch self"),
        ({"command": ["python", "-m", "a"], "roles": {"ps": 1}}, "use one of tensorflow, roles"),
        (
            {"command": ["a"], "launch": "roles", "roles": {"ps_machine_type": "n1-standard-4"}},
            "not apply without parameter servers",
        ),
        ({"stop_grace_s": 31}, "use launch self, or at most 30"),
        ({"result": "opaque"}, "evaluate_command is missing"),
        ({"resume_as_model": True}, "without resume_args"),
        ({"python_module": "a.task"}, "not apply to kind command"),
        ({**PACKAGE, "package_uris": []}, "package_uris is missing"),
        ({**PACKAGE, "image_uri": "a"}, "executor_image_uri is its image"),
    ],
)
def test_what_cannot_work_is_refused_with_what_does(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        trainer(**changes)


def test_the_cures_of_refused_settings_are_accepted() -> None:
    assert trainer(command=["llamafactory-cli", "train"], launch="self", stop_grace_s=60)
    assert trainer(result="opaque", evaluate_command=["python", "evaluate.py", "{model}"])
    assert trainer(**PACKAGE, command=["--epochs", "{epochs}"])


def test_accumulation_reads_the_batch_sizes() -> None:
    read = trainer(command=["a", "{gradient_accumulation_steps}", "{data}"]).used_settings
    assert read == {"train.global_batch_size", "train.micro_batch_size"}


@given(st.lists(st.sampled_from([*(f"{{{name}}}" for name in PLACEHOLDERS), '{"json": 1}', "{}", "plain"])))
def test_every_placeholder_is_replaced_and_nothing_else(words: list[str]) -> None:
    filled = fill_in(tuple(words), {name: f"<{name}>" for name in PLACEHOLDERS})
    known = {f"{{{name}}}": f"<{name}>" for name in PLACEHOLDERS}
    assert filled == [known.get(word, word) for word in words]
