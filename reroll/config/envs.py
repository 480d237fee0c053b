"""The environments that a policy acts in, and where they run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from reroll.config.actions import ActionConfig, TagActionConfig
from reroll.config.base import ImportPath, Node
from reroll.config.env_base import EnvConfig as EnvConfig
from reroll.config.imports import import_object


class ImportEnvConfig(EnvConfig):
    """Your own class with `reset`, `step` and `close`, plain or async (see `reroll.envs.base.Env`)."""

    kind: Literal["import"] = "import"
    path: ImportPath
    """`module:Class`; the folder of the YAML and the working directory are importable."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""

    def make(self) -> Any:
        return self.implementation()(**self.options)

    def implementation(self) -> Callable[..., Any]:
        found = import_object(self.path)
        if not callable(found):
            raise TypeError(f"{self.path} is a {type(found).__name__}: name a class with reset, step and close")
        missing = [name for name in ("reset", "step", "close") if inspect.isclass(found) and not hasattr(found, name)]
        if missing:
            raise TypeError(f"{self.path} has no {' and no '.join(missing)}: an environment has reset, step and close")
        return found  # type: ignore[no-any-return]

    def prepare(self) -> None:
        made_by = self.implementation()
        try:
            signature = inspect.signature(made_by)
        except ValueError:  # Some classes written in C do not tell.
            return
        try:
            signature.bind(**self.options)
        except TypeError as error:
            raise TypeError(f"{self.path} does not take these options: {error}") from None

    def rehearsals(self) -> Iterator[tuple[str, Callable[[], object]]]:
        yield "path", self.prepare


class EnvDomainConfig(Node):
    """The environment of a domain, and how the policy plays it."""

    env: EnvConfig
    """The environment that the domain's instances are played in."""
    actions: ActionConfig = Field(default_factory=lambda: TagActionConfig(kind="tag"))
    """How the policy writes an action. Environments with tools take `{kind: text}`."""
    format_penalty: float = Field(default=0.0, ge=0)
    """Taken off the reward of a turn without a valid action."""
    max_turns: int = Field(default=32, ge=1)
    """An episode that is not over by then is truncated."""
    history: int | None = Field(default=None, ge=1)
    """Exchanges that a turn is shown beside the opening; null: all. With fewer, an episode gives several training rows."""


class EnvLimitsConfig(Node):
    """What holds for environments wherever they run."""

    max_live: int = Field(default=256, ge=1)
    """Environments that exist at once. An episode beyond them waits for its turn, in order of asking."""
    max_message_chars: int = Field(default=20_000, ge=1)
    """A longer message of an environment is cut, with a note."""


class TimedEnvsConfig(EnvLimitsConfig):
    """Environments whose calls can be given up."""

    timeout_s: float = Field(default=60.0, gt=0)
    """A reset, step or close that takes longer fails its episode."""


class InlineEnvsConfig(EnvLimitsConfig):
    """In the run's own event loop: for environments that answer in microseconds. A hang or crash there is the run's own."""

    kind: Literal["inline"]


class ThreadEnvsConfig(TimedEnvsConfig):
    """Each on a thread of the run's process: for those that wait for a network or a disk. A hung one cannot be ended."""

    kind: Literal["threads"]


class ProcessEnvsConfig(TimedEnvsConfig):
    """In child processes that host several each. One that hangs or crashes is replaced."""

    kind: Literal["processes"] = "processes"
    num_workers: int | None = Field(default=None, ge=1)
    """Processes; default: one per core."""


class RayEnvsConfig(TimedEnvsConfig):
    """In Ray actors that host several each, on any node of the cluster. Needs `runtime.kind: ray`."""

    kind: Literal["ray"]
    num_workers: int = Field(default=1, ge=1)
    """Actors."""


EnvWorkersConfig = Annotated[
    InlineEnvsConfig | ThreadEnvsConfig | ProcessEnvsConfig | RayEnvsConfig, Field(discriminator="kind")
]
