"""The server of tools, on standard input and output."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from vlmpipe.cli.mcp.documents import Answer, unexpected
from vlmpipe.trainer import __version__
from vlmpipe.trainer.printable import escaped_in_json

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server
    from mcp_types import CallToolResult

    from vlmpipe.cli.mcp.session import Session, ToolSpec


def serve(session: Session) -> None:
    """Serve until standard input ends."""
    import anyio

    try:
        anyio.run(_serve, session)
    finally:
        session.close()


async def _serve(session: Session) -> None:
    import anyio
    from mcp.server.stdio import stdio_server

    # The client's end of standard output is for the protocol alone: whatever is printed goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8", errors="replace")
    server = server_of(session)
    async with stdio_server(anyio.wrap_file(requests), anyio.wrap_file(answers)) as (received, sent):
        await server.run(received, sent, server.create_initialization_options())


def server_of(session: Session) -> Server[object]:
    """The server of a session's tools."""
    import anyio
    from mcp.server.lowlevel import Server
    from mcp_types import CallToolRequestParams, ListToolsResult, Tool, ToolAnnotations

    def as_tool(spec: ToolSpec) -> Tool:
        hints = ToolAnnotations(read_only_hint=spec.is_read_only)
        return Tool(name=spec.name, description=spec.description, input_schema=dict(spec.schema), annotations=hints)

    async def list_tools(_context: object, _parameters: object) -> ListToolsResult:
        return ListToolsResult(tools=[as_tool(spec) for spec in session.tools()])

    async def call_tool(_context: object, parameters: CallToolRequestParams) -> CallToolResult:
        call = partial(_answer, session, parameters.name, parameters.arguments or {})
        return as_result(await anyio.to_thread.run_sync(call, abandon_on_cancel=True))

    return Server(
        "vlmpipe",
        version=__version__,
        instructions=session.instructions,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def as_result(answer: Answer) -> CallToolResult:
    """The answer as the protocol has it."""
    from mcp_types import CallToolResult, TextContent

    document = answer.document()
    text = escaped_in_json(json.dumps(document, ensure_ascii=False))
    return CallToolResult(
        content=[TextContent(type="text", text=text)], structured_content=json.loads(text), is_error=not document["ok"]
    )


def _answer(session: Session, tool: str, arguments: dict[str, object]) -> Answer:
    """The answer of a call, also of one with an unforeseen exception: the server must answer the next one."""
    try:
        return session.call(tool, arguments)
    except Exception as error:
        print(f"unexpected {type(error).__name__} in the tool {tool}: {error}", file=sys.stderr)
        return Answer.failed(unexpected(error))
