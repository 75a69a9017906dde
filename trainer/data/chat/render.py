"""Renders a chat template as transformers does. Run as a program, it renders what it is sent, within a budget.

A template is a stranger's program in a sandbox that bounds neither its time nor its memory. This module's process has
bounds of the operating system for both, and nothing of the run: no secret is in its environment.
"""

from __future__ import annotations

import json
import sys

from vlmpipe.trainer.data.bounded_process import bound_memory, bound_time

CPU_S = 10  # of one rendering; the longest of published templates take milliseconds
MEMORY_BYTES = 512 << 20  # beyond what the process has when it starts
DATE_MARK = "\uf8ff"  # private use
CLOCK = "{% macro strftime_now(format) %}" + DATE_MARK + "{% endmacro %}\n"  # replaces the library's


class TemplateError(Exception):
    """A template does not render a conversation: what is wrong, as the end of a sentence about the template."""


def render(
    source: str, chat: list[dict[str, object]], tokens: dict[str, str], *, tools: str = "", add_generation_prompt: bool
) -> str:
    """The text of a conversation, with a mark in place of the date. Raises TemplateError.

    tools: those of the conversation, as JSON.
    """
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            conversations=[chat],
            chat_template=CLOCK + source if "strftime_now" in source else source,
            tools=json.loads(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **tokens,
        )
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"is no valid Jinja: line {error.lineno}: {error.message}") from error
    except (MemoryError, RecursionError) as error:
        raise TemplateError(f"takes too much memory ({type(error).__name__})") from error
    except Exception as error:  # it is a program, and raises what it likes
        raise TemplateError(f"does not allow this conversation: {error}") from error
    return str(rendered[0])


def main() -> None:
    """Answer each line of standard input, a JSON object with the arguments of `render`, with a line."""
    import jinja2  # noqa: F401, before memory is bounded
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: F401

    bound_memory(MEMORY_BYTES)
    print(flush=True)  # ready
    for line in sys.stdin:
        bound_time(CPU_S)
        try:
            answer = json.dumps({"text": render(**json.loads(line))})
        except TemplateError as error:
            answer = json.dumps({"problem": str(error)[:1000]})
        except MemoryError:
            answer = json.dumps({"problem": "takes too much memory"})
        print(answer, flush=True)


if __name__ == "__main__":
    main()
