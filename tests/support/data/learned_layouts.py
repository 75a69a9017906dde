"""Layouts whose records say what is learned, and those with tools."""

from __future__ import annotations

from tests.support.data.layouts import (
    ROWS,
    Layout,
    asked,
    lines,
    said,
)

LEARNED_LAYOUTS: dict[str, Layout] = {
    "OpenAI's weight of 0": Layout(
        lines(lambda n: {"image": f"{n}.png", "messages": said(n, weight=0)}), refused="conv.labels", has_folder=True
    ),
    "OpenAI's weight of 1": Layout(
        lines(lambda n: {"image": f"{n}.png", "messages": said(n, weight=1)}), ROWS, has_folder=True
    ),
    "an answer without loss": Layout(
        lines(lambda n: {"image": f"{n}.png", "messages": said(n, loss=False)}), refused="conv.labels", has_folder=True
    ),
    "OpenAI's weight of 0 in an earlier answer": Layout(
        lines(lambda n: {"image": f"{n}.png", "messages": [*said(n, weight=0), *said(n, "", weight=1)]}), ROWS,
        has_folder=True,
    ),
    "ms-swift's loss of earlier answers": Layout(
        lines(lambda n: {"images": [f"{n}.png"], "messages": [*said(n, loss=False), *said(n, "", loss=None)]}), ROWS,
        has_folder=True,
    ),
    "axolotl's messages to train": Layout(
        lines(
            lambda n: {
                "image": f"{n}.png",
                "conversations": [{**one, "train": place == 3} for place, one in enumerate([*asked(n), *asked(n, "")])],
            }
        ),
        ROWS, has_folder=True,
    ),
    "a question to train": Layout(
        lines(lambda n: {"conversations": [{**one, "train": True} for one in asked(n, "")]}), refused="conv.labels"
    ),
    "weight and loss that disagree": Layout(
        lines(lambda n: {"messages": said(n, "", weight=0, loss=True)}), refused="record.conflict"
    ),
    "a scale of the loss": Layout(
        lines(lambda n: {"image": f"{n}.png", "messages": said(n, loss_scale=0.5)}), refused="conv.labels",
        has_folder=True,
    ),
    "a call of a tool": Layout(
        lines(lambda n: {"messages": said(n, "", tool_calls=[{"id": "1", "function": {"name": "look"}}])}),
        0,
    ),
    "OpenAI's tools and their results": Layout(
        lines(
            lambda n: {
                "tools": [{"type": "function", "function": {"name": "look"}}],
                "messages": [
                    *said(n, "", content=None, tool_calls=[{"function": {"name": "look", "arguments": "{}"}}]),
                    {"role": "tool", "tool_call_id": "1", "content": "Found."},
                    {"role": "assistant", "content": f"Number {n}."},
                ],
            }
        ),
        0, 2 * ROWS,
    ),
    "ms-swift's tool_call and tool_response": Layout(
        lines(
            lambda n: {
                "images": [f"{n}.png"],
                "messages": [
                    said(n)[0],
                    {"role": "tool_call", "content": '{"name": "look", "arguments": {}}', "loss": False},
                    {"role": "tool_response", "content": "Found."},
                    said(n)[1],
                ],
            }
        ),
        ROWS, has_folder=True,
    ),
    "LLaMA-Factory's function_call": Layout(
        lines(
            lambda n: {
                "tools": '[{"name": "look"}]',
                "conversations": [
                    asked(n, "")[0],
                    {"from": "function_call", "value": '{"name": "look", "arguments": {}}'},
                    {"from": "observation", "value": "Found."},
                    asked(n, "")[1],
                ],
            }
        ),
        0, 2 * ROWS,
    ),
    "tools of a question and its answer": Layout(
        lines(lambda n: {"question": "Which?", "answer": f"{n}.", "tools": [{"name": "look"}]}), refused="conv.labels"
    ),
    "a call without a name": Layout(
        lines(lambda n: {"messages": said(n, "", tool_calls=[{"function": {}}])}), refused="record.form"
    ),
    "a result without a call": Layout(
        lines(lambda n: {"messages": [*said(n, ""), {"role": "tool", "content": "x"}, *said(n, "")[1:]]}),
        refused="conv.roles",
    ),
    "LLaMA-Factory's tools": Layout(
        lines(lambda n: {"conversations": asked(n, ""), "system": "Be brief.", "tools": '[{"name": "look"}]'}),
        0,
    ),
    "LLaMA-Factory without tools": Layout(
        lines(lambda n: {"conversations": asked(n, ""), "system": "Be brief.", "tools": ""}), 0
    ),
}  # fmt: skip
