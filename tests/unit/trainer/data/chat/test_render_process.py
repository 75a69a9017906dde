"""Templates of strangers cost bounded time and memory, and whatever they do ends in a sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.short_form import chosen
from tests.support.trainer.chat_templates import PLAIN
from vlmpipe.trainer.data.bounded_process import ENVIRONMENT, SETTINGS, BoundedProcess
from vlmpipe.trainer.data.chat import render
from vlmpipe.trainer.data.chat.render import TemplateError
from vlmpipe.trainer.data.chat.render_process import MODULE
from vlmpipe.trainer.data.chat.render_process import render as render_there

CHAT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It."}]
SLOW = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a large power": "{{ 9 ** (9 ** 9) }}",
    "a long text": "{{ 'x' * 10 ** 10 }}",
    "doubling": "{% set n = namespace(t='x') %}{% for a in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "a wide field": "{{ '%9999999999d' % 1 }}",
    "centred": "{{ 'x' | center(10 ** 11) }}",
}
WRONG = {
    "a loop of the sandbox's limit": "{% for a in range(10 ** 9) %}{% endfor %}",
    "a macro without an end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "divided by zero": "{{ 1 / 0 }}",
    "an overflow": "{{ 10.0 ** 1000 }}",
    "an attribute": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "an error of its own": "{{ raise_exception('roles \\x1b[2J must alternate') }}",
    "no Jinja": "{% for %}",
    "deep": "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "an unknown filter": "{{ 1 | nothing }}",
}


@pytest.fixture(scope="module")
def process() -> Iterator[BoundedProcess]:
    made = BoundedProcess(MODULE, "renders chat templates", cpu_s=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_secret")
        yield made
    made.end()


@pytest.mark.timeout(400)
def test_what_takes_too_much_is_refused_and_the_next_template_is_rendered(
    process: BoundedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same program with less time, which tests need not wait for.
    code = "from vlmpipe.trainer.data.chat import render; render.CPU_S = 1; render.main()"
    monkeypatch.setattr(process, "_command", [*process._command[:2], "-c", code])
    process.end()
    for name, source in chosen(SLOW, ("loops", "doubling", "centred").__contains__).items():  # each start takes seconds
        with pytest.raises(TemplateError, match="takes"):
            print(name, render_there(source, CHAT, {}, add_generation_prompt=False, process=process)[:100])
    assert render_there(PLAIN, CHAT, {}, add_generation_prompt=False, process=process).count("<|end|>") == 2


def test_whatever_a_template_does_wrong_is_a_sentence(process: BoundedProcess) -> None:
    for name, source in WRONG.items():
        with pytest.raises(TemplateError) as error:
            render_there(source, CHAT, {}, add_generation_prompt=False, process=process)
        assert str(error.value).startswith(("does not allow", "is no valid Jinja", "takes too much memory")), name


def test_the_process_renders_what_this_one_renders(process: BoundedProcess) -> None:
    chat = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\u4e2d\ud800\x00\n\u2028?"}]},
        *CHAT[1:],
    ]
    for prompt in (False, True):
        for source in (PLAIN, "{{ bos }}{{ strftime_now('%d') }}{{ messages | tojson }}"):
            here = render.render(source, chat, {"bos": "<s>"}, add_generation_prompt=prompt)
            assert render_there(source, chat, {"bos": "<s>"}, add_generation_prompt=prompt, process=process) == here


def test_the_process_sees_no_secret(process: BoundedProcess) -> None:
    assert render_there("x", CHAT, {}, add_generation_prompt=False, process=process) == "x" and process.pid
    with open(f"/proc/{process.pid}/environ", "rb") as file:
        names = {entry.partition(b"=")[0].decode() for entry in file.read().split(b"\0") if entry}
    assert names <= {*ENVIRONMENT, *SETTINGS} and "HF_TOKEN" in os.environ
