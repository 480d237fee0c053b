"""The tools that a policy may call, and the environments in which it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from reroll.config.base import ImportPath, Node
from reroll.config.data_base import RowSourceConfig
from reroll.config.env_base import EnvConfig
from reroll.config.imports import import_object
from reroll.errors import EnvError
from reroll_zoo.sandbox.config import LocalSandboxConfig, SandboxConfig


class PythonToolConfig(Node):
    """The tool `python`: runs code in the sandbox and gives back what it prints."""

    kind: Literal["python"]
    memory_mb: int = Field(default=512, ge=64)
    """Address space of the process. Libraries such as NumPy take some 100 of it."""
    sandbox: SandboxConfig = LocalSandboxConfig(site_packages=True)
    """Where the code runs. By default it may import what is installed beside reroll."""


class FunctionToolConfig(Node):
    """A function of yours: its signature says what it takes, its docstring what it does and, under `Args:`, what each is."""

    kind: Literal["import"]
    path: ImportPath
    """`module:name`; the folder of the YAML and the working directory are importable."""


class McpStdioConfig(Node):
    """The tools of an MCP server, started as a program for each episode."""

    kind: Literal["mcp_stdio"]
    command: str
    """The program that is the server."""
    args: list[str] = Field(default_factory=list)
    """Its arguments."""
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the few variables that a server inherits (HOME, PATH, …)."""


class McpHttpConfig(Node):
    """The tools of an MCP server that runs elsewhere (streamable HTTP), with a session for each episode."""

    kind: Literal["mcp_http"]
    url: str = Field(pattern=r"^https?://", examples=["http://localhost:8000/mcp"])
    """Where the server listens."""
    headers: dict[str, str] = Field(default_factory=dict)
    """E.g. `{Authorization: Bearer …}`."""


ToolConfig = Annotated[
    PythonToolConfig | FunctionToolConfig | McpStdioConfig | McpHttpConfig,
    Field(discriminator="kind"),
]


class ToolLimitsConfig(EnvConfig):
    """What all environments with tools share."""

    max_calls: int = Field(default=8, ge=1)
    """Tool calls in an episode. A turn that still calls when none is left truncates it."""
    call_timeout_s: float = Field(default=10.0, gt=0)
    """A call that takes longer is answered with an error."""
    max_result_chars: int = Field(default=2000, ge=100)
    """Longer results are cut in the middle."""


class ToolEnvConfig(ToolLimitsConfig):
    """Tasks of a prompt source, solved with tools. The seed names a row, counted round. A right answer pays 1.

    Answers are compared as numbers where both are numbers, else as words, without case, articles and punctuation.
    """

    runs: ClassVar[str] = "reroll_zoo.tool_use.tasks:ToolTasks"

    kind: Literal["tools"] = "tools"
    tasks: RowSourceConfig
    """Prompts with answers."""
    tools: list[ToolConfig] = Field(min_length=1)
    """What the policy may call."""

    @property
    def is_remote(self) -> bool:
        return any(isinstance(tool, McpHttpConfig) for tool in self.tools)

    def prepare(self) -> None:
        self.make().close()  # It opens the sandbox of its tools, or says what the machine lacks.

    def rehearsals(self) -> Iterator[tuple[str, Callable[[], object]]]:
        for index, tool in enumerate(self.tools):
            if isinstance(tool, FunctionToolConfig):
                yield f"tools.{index}.path", partial(_rehearse, tool)


def _rehearse(tool: FunctionToolConfig) -> None:
    from reroll_zoo.tool_use.tool import function_tool

    function = import_object(tool.path)
    try:
        function_tool(function)
    except ValueError as error:
        raise EnvError(str(error)) from error
