"""The process that renders templates of strangers: one for all templates and threads of this process."""

from __future__ import annotations

import json

from vlmpipe.trainer.data.bounded_process import BoundedProcess
from vlmpipe.trainer.data.chat.render import CPU_S, MEMORY_BYTES, TemplateError

MODULE = "vlmpipe.trainer.data.chat.render"
PROCESS = BoundedProcess(MODULE, "renders chat templates", cpu_s=CPU_S)


def render(
    source: str,
    chat: list[dict[str, object]],
    tokens: dict[str, str],
    *,
    tools: str = "",
    add_generation_prompt: bool,
    process: BoundedProcess = PROCESS,
) -> str:
    """The text of a conversation, rendered within the budget of the process. Raises TemplateError."""
    asked = {
        "source": source, "chat": chat, "tokens": tokens, "tools": tools, "add_generation_prompt": add_generation_prompt
    }  # fmt: skip
    answer = process.ask(json.dumps(asked).encode())
    if answer is None:
        limits = f"{CPU_S} s of processor time and {MEMORY_BYTES >> 20} MiB of memory"
        raise TemplateError(f"takes more than a template may: {limits} for a conversation")
    result = json.loads(answer)
    if "problem" in result:
        raise TemplateError(result["problem"])
    return str(result["text"])
