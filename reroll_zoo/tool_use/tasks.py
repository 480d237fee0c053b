"""Tasks of a prompt source, solved with tools that a config describes."""

from __future__ import annotations

from contextlib import ExitStack
from functools import lru_cache

from reroll.config.data_base import RowSourceConfig
from reroll.config.imports import import_object
from reroll.data.sources import load_source
from reroll.errors import ConfigError, DataError, Violation
from reroll.types import Message
from reroll_zoo.tool_use.config import (
    FunctionToolConfig,
    McpHttpConfig,
    McpStdioConfig,
    PythonToolConfig,
    ToolConfig,
    ToolEnvConfig,
)
from reroll_zoo.tool_use.env import Task, ToolLoop
from reroll_zoo.tool_use.python import python_tool
from reroll_zoo.tool_use.tool import Tool, function_tool


class ToolTasks(ToolLoop):
    """An episode for each prompt of a source.

    MCP servers are started with an episode and closed with it: what one episode does to a server, no other sees.
    """

    def __init__(self, options: ToolEnvConfig) -> None:
        self._tasks = _load_tasks(options.tasks.model_dump_json())
        self._own = [tool for config in options.tools if (tool := _own_tool(config))]
        self._servers = [config for config in options.tools if isinstance(config, McpStdioConfig | McpHttpConfig)]
        self._running = ExitStack()
        super().__init__(options, tools=self._own)

    def draw_task(self, seed: int) -> Task:
        return self._tasks[seed % len(self._tasks)]

    def reset(self, seed: int) -> tuple[Message, ...]:
        """Start the servers, and the episode with their tools."""
        self.close()
        if self._servers:
            try:
                from reroll_zoo.tool_use.mcp import McpServer
            except ModuleNotFoundError as error:
                raise ConfigError([Violation("tools", f"MCP needs a package: {error}", "pip install 'reroll[mcp]'")]) from error
            servers = [self._running.enter_context(McpServer(config)) for config in self._servers]
            self.use([*self._own, *(tool for server in servers for tool in server.tools)])
        return super().reset(seed)

    def close(self) -> None:
        """End the episode and the servers."""
        super().close()
        self._running.close()


def _own_tool(config: ToolConfig) -> Tool | None:
    """A tool that needs no server."""
    match config:
        case PythonToolConfig():
            return python_tool(memory_mb=config.memory_mb, sandbox=config.sandbox)
        case FunctionToolConfig():
            return function_tool(import_object(config.path))
        case _:
            return None


@lru_cache(maxsize=8)
def _load_tasks(source: str) -> tuple[Task, ...]:
    """The tasks of a source, given as JSON, once a process."""
    config = RowSourceConfig.model_validate_json(source)
    prompts = load_source(config)
    bare = next((prompt for prompt in prompts if prompt.answer is None), None)
    if bare is not None:
        raise DataError(f"prompt {bare.id} has no answer to judge by: give every row one, or set answer_key")
    return tuple(Task(messages=prompt.messages, answer=str(prompt.answer)) for prompt in prompts)
