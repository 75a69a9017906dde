"""`vlmpipe check`: what can be known of a chat template before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.check import check_run
from tests.support.pipelines.run_files import small
from tests.support.trainer.chat_templates import PLAIN, TEMPLATES, with_template
from trainer.errors import ExitCode


@pytest.mark.parametrize(
    ("template", "state", "text"),
    [
        (PLAIN, "ok", "native: 7 of 9 kinds of conversation; not thinking"),
        (TEMPLATES["no end token"], "failed", "writes no end token behind the text of answer 1"),
    ],
)
def test_a_chat_template_is_proved(template: str, state: str, text: str, tmp_path: Path) -> None:
    with_template(template.replace("<|image_pad|>", "<image>"), image="<image>").save_pretrained(tmp_path)
    findings = check_run(small(model__tokenizer=str(tmp_path), data__chat_template="native"))
    (found,) = [finding for finding in findings if finding.subject == "chat template"]
    assert found.state == state and text in found.text
    assert found.code == (ExitCode.CONFIG if state == "failed" else 0)


def test_a_template_of_another_machine_is_proved_later() -> None:
    findings = check_run(small(model__tokenizer="some/model", data__chat_template="gs://bucket/mine.jinja"))
    (found,) = [finding for finding in findings if finding.subject == "chat template"]
    assert found.state == "unchecked"
