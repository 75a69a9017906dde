"""Templates of strangers cost bounded time and memory, and whatever they do ends in a sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.short_form import chosen
from tests.support.trainer.chat_templates import PLAIN
from vlmpipe.trainer.data.chat import render, render_process
from vlmpipe.trainer.data.chat.render import TemplateError
from vlmpipe.trainer.data.chat.render_process import ENVIRONMENT, RenderProcess

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
def process() -> Iterator[RenderProcess]:
    made = RenderProcess()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_secret")
        yield made
    made.end()


@pytest.mark.timeout(400)
def test_what_takes_too_much_is_refused_and_the_next_template_is_rendered(
    process: RenderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_start", started_with(process, cpu_s=1))
    for name, source in chosen(SLOW, lambda name: name != "a large power").items():  # each start takes seconds
        with pytest.raises(TemplateError, match="takes"):
            print(name, process.render(source, CHAT, {}, add_generation_prompt=False)[:100])
    assert process.render(PLAIN, CHAT, {}, add_generation_prompt=False).count("<|end|>") == 2


def started_with(process: RenderProcess, cpu_s: int) -> object:
    """A start of the same program with less time, which tests need not wait for."""
    start = type(process)._start
    code = f"from vlmpipe.trainer.data.chat import render; render.CPU_S = {cpu_s}; render.main()"

    def started() -> object:
        with pytest.MonkeyPatch.context() as patch:
            popen = render_process.subprocess.Popen
            patch.setattr(
                render_process.subprocess,
                "Popen",
                lambda command, **options: popen([*command[:2], "-c", code], **options),
            )
            return start(process)

    return started


def test_whatever_a_template_does_wrong_is_a_sentence(process: RenderProcess) -> None:
    for name, source in WRONG.items():
        with pytest.raises(TemplateError) as error:
            process.render(source, CHAT, {}, add_generation_prompt=False)
        assert str(error.value).startswith(("does not allow", "is no valid Jinja", "takes too much memory")), name


def test_the_process_renders_what_this_one_renders(process: RenderProcess) -> None:
    chat = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\u4e2d\ud800\x00\n\u2028?"}]},
        *CHAT[1:],
    ]
    for prompt in (False, True):
        for source in (PLAIN, "{{ bos }}{{ strftime_now('%d') }}{{ messages | tojson }}"):
            here = render.render(source, chat, {"bos": "<s>"}, add_generation_prompt=prompt)
            assert process.render(source, chat, {"bos": "<s>"}, add_generation_prompt=prompt) == here


def test_the_process_sees_no_secret(process: RenderProcess) -> None:
    assert process.render("x", CHAT, {}, add_generation_prompt=False) == "x" and process._process
    with open(f"/proc/{process._process.pid}/environ", "rb") as file:
        names = {entry.partition(b"=")[0].decode() for entry in file.read().split(b"\0") if entry}
    assert names <= {*ENVIRONMENT, "HF_HUB_OFFLINE", "PYTHONIOENCODING"} and "HF_TOKEN" in os.environ


def test_a_forked_child_has_a_process_of_its_own() -> None:
    before = render_process.PROCESS
    render_process._forget_in_child()
    assert render_process.PROCESS is not before
    render_process.PROCESS = before
