"""Nine kinds of conversation are tried before data is read, and the sentence names those that a template refuses."""

from __future__ import annotations

import pytest

from tests.support.trainer.chat_templates import TEMPLATES, with_template
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.chat.proof import CONVERSATIONS, prove
from vlmpipe.trainer.data.tokenize import CHAT_TEMPLATE

NO_THINKING = {"thinking", "thinking in earlier turns"}
REFUSES = {
    "thinks": set(),
    "plain": NO_THINKING,
    "drops earlier thinking": {"thinking in earlier turns"},
    "no images in answers": NO_THINKING | {"images in answers"},
    "alternates": NO_THINKING | {"two questions in a row", "a system text"},
    "dates": CONVERSATIONS.keys() - {"a system text"},
    "upper case": CONVERSATIONS.keys(),
}


@pytest.mark.parametrize(("template", "refused"), REFUSES.items())
def test_kinds_that_a_template_refuses_are_named(template: str, refused: set[str]) -> None:
    proof = prove(Chat(with_template(TEMPLATES[template]), as_text=False))
    assert proof.refused.keys() == refused
    assert all(f"not {kind} (the chat template " in proof.described() for kind in refused)
    assert len(CONVERSATIONS) == 9


def test_the_format_of_models_trained_from_scratch_allows_all_but_thinking() -> None:
    source = CHAT_TEMPLATE.replace("<image>", "<|image_pad|>")
    proof = prove(Chat(with_template(source, bos="<|turn|>")))
    assert proof.refused.keys() == NO_THINKING and proof.starts_at_prompt


def test_a_prompt_that_training_does_not_continue_is_said() -> None:
    proof = prove(Chat(with_template(TEMPLATES["prompt thinks"]), as_text=False))
    assert "labels start at the answer" in proof.described()
