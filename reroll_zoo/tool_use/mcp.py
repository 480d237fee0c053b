"""The tools of an MCP server, called by plain code. The only file that imports `mcp`, and `httpx2`, which comes with it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import tempfile
import threading
from contextlib import AsyncExitStack
from functools import partial
from typing import IO, Any, Self, TextIO, cast

import httpx2
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from reroll.errors import EnvError
from reroll_zoo.tool_use.config import McpHttpConfig, McpStdioConfig
from reroll_zoo.tool_use.tool import Tool, ToolError

_START_S = 30.0
"""How long a server may take to start and to list its tools."""
_GRACE_S = 10.0
"""What the session gets beyond a call's own time, and for closing: a server that does not end is killed within it."""
_STDERR_CHARS = 500
"""How much of what a server said last goes into the error if it does not start."""


class McpServer:
    """One session with a server, on an event loop in a thread of its own. Use it in a `with` statement.

    A server that cannot be started is an EnvError. One that dies or hangs later fails the calls that are made to it.
    """

    def __init__(self, config: McpStdioConfig | McpHttpConfig) -> None:
        self._config = config
        self._name = config.command if isinstance(config, McpStdioConfig) else config.url
        self._ready: concurrent.futures.Future[list[Tool]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=f"mcp {self._name}", daemon=True)
        self.tools: list[Tool] = []
        """What the server offers."""

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.tools = self._ready.result()
        except EnvError:
            self._thread.join(_GRACE_S)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._loop.call_soon_threadsafe(self._stop.set)
        except RuntimeError:  # The session has ended by itself.
            return
        self._thread.join(_GRACE_S)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        with tempfile.TemporaryFile("w+", errors="replace") as stderr:
            try:
                async with AsyncExitStack() as stack:
                    async with asyncio.timeout(_START_S):
                        client = await self._connect(stack, stderr)
                        tools = await self._list_tools(client)
                    self._ready.set_result(tools)
                    await self._stop.wait()
            # Whatever a server and its transport come up with, cancellation by their task groups included.
            except (Exception, asyncio.CancelledError) as error:
                if not self._ready.done():
                    why = f"{_reason(error)} {_tail(stderr)}".strip()
                    self._ready.set_exception(EnvError(f"the MCP server {self._name} did not start: {why}"))

    async def _connect(self, stack: AsyncExitStack, stderr: IO[str]) -> Client:
        if isinstance(self._config, McpStdioConfig):
            command = StdioServerParameters(command=self._config.command, args=self._config.args, env=self._config.env)
            return await stack.enter_async_context(Client(stdio_client(command, errlog=cast(TextIO, stderr))))
        # Each call has a time limit of its own: answers may be long in coming.
        timeout = httpx2.Timeout(_START_S, read=None)
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=self._config.headers, timeout=timeout))
        return await stack.enter_async_context(Client(streamable_http_client(self._config.url, http_client=http)))

    async def _list_tools(self, client: Client) -> list[Tool]:
        tools: list[Tool] = []
        page = await client.list_tools()
        while True:
            for tool in page.tools:
                run = partial(self._call, client, tool.name)
                about = " ".join((tool.description or "").split())
                tools.append(Tool(name=tool.name, description=about, parameters=tool.input_schema, run=run))
            if page.next_cursor is None:
                return tools
            page = await client.list_tools(cursor=page.next_cursor)

    def _call(self, client: Client, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        asked = _ask(client, name, arguments, timeout_s)
        try:
            return asyncio.run_coroutine_threadsafe(asked, self._loop).result(timeout_s + _GRACE_S)
        except ToolError:
            raise
        except TimeoutError:
            raise ToolError(f"{name} took more than {timeout_s:g} s and was stopped.") from None
        except (Exception, concurrent.futures.CancelledError) as error:
            asked.close()  # It never ran if the loop is gone.
            raise ToolError(f"The server of {name} does not answer: {_reason(error)}.") from error


async def _ask(client: Client, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
    async with asyncio.timeout(timeout_s):
        result = await client.call_tool(name, arguments)
    text = "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in result.content)
    if result.is_error:
        raise ToolError(text or f"{name} failed without a word.")
    return text or json.dumps(result.structured_content, ensure_ascii=False)


def _reason(error: BaseException) -> str:
    """The first cause in a group of errors: the transports run in task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"it took more than {_START_S:g} s"
    return str(error) or type(error).__name__


def _tail(stderr: IO[str]) -> str:
    stderr.seek(0)
    return stderr.read()[-_STDERR_CHARS:].strip()
