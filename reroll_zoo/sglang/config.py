"""The options of the sglang engine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, JsonValue

from reroll.config.host import foreign_environment, num_visible_gpus
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation
from reroll_zoo.external_engine.config import ExternalEngineConfig

_FIND_SGLANG = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"


class SglangConfig(ExternalEngineConfig):
    """sglang, in a process with a Python of its own, because it pins packages that reroll needs newer."""

    runs: ClassVar[str] = "reroll_zoo.sglang.engine:SglangEngine"

    kind: Literal["sglang"] = "sglang"
    python: str
    """The interpreter that has sglang: `scripts/setup_sglang.sh FOLDER` makes FOLDER/bin/python."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """More settings of sglang's `ServerArgs`, by their names there. They win over what reroll sets."""

    def violations(self, config: RlvrConfig) -> Iterator[Violation]:
        yield from super().violations(config)
        is_ray = config.runtime.kind == "ray"
        if self.devices == "cpu" or (self.devices == "auto" and not is_ray and not num_visible_gpus()):
            yield Violation("engine.devices", "sglang needs a GPU", "name GPUs, or set engine.kind to embedded or vllm")
        if is_ray:
            return  # The interpreter is on the nodes that get an engine.
        fix = "make one that has: scripts/setup_sglang.sh FOLDER, and name FOLDER/bin/python"
        if (python := shutil.which(self.python)) is None:
            yield Violation("engine.python", f"there is no interpreter {self.python}", fix)
        elif subprocess.run([python, "-c", _FIND_SGLANG], env=foreign_environment(), check=False).returncode:
            yield Violation("engine.python", f"{self.python} has no package sglang", fix)
