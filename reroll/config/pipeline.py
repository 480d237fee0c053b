"""What every pipeline's config has, and how a config's `pipeline` is found: by the entry points of `reroll.pipelines`.

[project.entry-points."reroll.pipelines"]
sft = "reroll_zoo.offline.config:SftConfig"
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from reroll.config.base import Node
from reroll.config.cluster import MachinesConfig
from reroll.config.data import SourcesConfig
from reroll.config.parts import CheckpointConfig, FixedModelConfig, LocalRuntimeConfig, PolicyConfig, RunConfig, RuntimeConfig
from reroll.config.registry import entry_names, load_entry
from reroll.config.reward_hosted import HostedJudgeConfig
from reroll.errors import Violation

GROUP = "reroll.pipelines"


class PipelineConfig(Node):
    """What every pipeline has."""

    runs: ClassVar[str]
    """`module:Class` of the pipeline that such a config is run by. It is imported no sooner."""

    pipeline: str
    run: RunConfig = Field(default_factory=RunConfig)
    runtime: RuntimeConfig = Field(default_factory=LocalRuntimeConfig)
    """Where the workers live: in this process, in processes of this machine, or on a Ray cluster."""
    cluster: MachinesConfig | None = None
    """The machines that the run is planned and checked for; null: this machine, as far as it can be told."""
    policy: PolicyConfig
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    data: SourcesConfig

    @property
    def reads(self) -> str:
        """`module:function` that gives the rows of a source, with every one checked. It loads no torch."""
        raise NotImplementedError

    @property
    def summary(self) -> str:
        """What it would do, in a line."""
        return f"{self.pipeline} of {self.policy.model}, {self.run.steps} steps"

    def named_models(self) -> Iterator[tuple[str, FixedModelConfig | HostedJudgeConfig]]:
        """(path, config) of every model of the run."""
        yield "policy", self.policy

    def violations(self) -> Iterator[Violation]:
        """What the pipeline's own rules across fields find wrong; `config.check` has those that hold for all."""
        yield from ()


def find_pipeline(name: str) -> type[PipelineConfig] | None:
    """The config class that a package registered under this name, if one did. Raises ValueError if it cannot be used."""
    found = load_entry(GROUP, name)
    if found is None or (isinstance(found, type) and issubclass(found, PipelineConfig)):
        return found
    raise ValueError(f"{name} is {found!r} in the entry points of {GROUP}: name a config class derived from PipelineConfig")


def pipeline_names() -> list[str]:
    """The names that packages registered."""
    return entry_names(GROUP)


def pipelines() -> dict[str, type[PipelineConfig]]:
    """All installed pipelines' config classes, by name. Those that cannot be imported are left out."""
    found: dict[str, type[PipelineConfig]] = {}
    for name in pipeline_names():
        try:
            root = find_pipeline(name)
        except ValueError:
            continue
        if root is not None:
            found[name] = root
    return found
