"""What `engine.precision: fp8` asks of a config, and what it stands for. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reroll.config.host import model_card, num_visible_gpus, parse_devices
from reroll.config.parts import ELASTIC, DeviceSelectionConfig, EmbeddedEngineConfig
from reroll.config.pipeline import PipelineConfig
from reroll.config.recurrent import carries_state
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation
from reroll_zoo.vision.kinds import seeing_family

WHERE, FIX = "engine.precision", "set it to bf16, or same"

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What families call the number of their experts."""

_TRUNCATED = {"level": "token", "mode": "truncate", "high": 2.0}


def preset(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config that draws in fp8 stands for where it does not say otherwise: tokens are weighed by trainer / engine, as
    the preset `tis` has it. Not where ratios are taken against the engine's log-probs already, and not where nothing is learned
    from advantages."""
    engine, rollout = tree.get("engine"), tree.get("rollout")
    if not isinstance(engine, Mapping) or engine.get("precision") != "fp8":
        return {}
    may_be_stale = isinstance(rollout, Mapping) and bool(rollout.get("max_staleness"))
    has_ratio_to_engine = {"sampler": True, "auto": may_be_stale}.get(str(tree.get("old_policy")), False)
    if has_ratio_to_engine or (tree.get("distill_only") and tree.get("distill")):
        return {}
    return {"old_policy": "trainer", "corrections": [_TRUNCATED]}


def violations(config: PipelineConfig, *, opens: bool) -> Iterator[Violation]:
    """What keeps a config from drawing in fp8, as far as it can be told before a model is opened."""
    if not isinstance(config, RlvrConfig) or config.engine.precision != "fp8":
        return
    if not isinstance(config.engine, EmbeddedEngineConfig):
        yield Violation(WHERE, f"is fp8, which engine {config.engine.kind} does not have", "set engine.kind to embedded")
    elif _is_on_cpu(config):
        yield Violation(WHERE, "is fp8, and the engine is on a CPU, which has no products of 8-bit floats", FIX)
    if problem := _family_problem(config.policy.model):
        yield Violation(WHERE, f"is fp8, and {problem}", FIX)


def _is_on_cpu(config: RlvrConfig) -> bool:
    devices = config.engine.devices
    if isinstance(devices, DeviceSelectionConfig) or (devices in ("auto", ELASTIC) and config.runtime.spans_nodes):
        return False  # GPUs of machines that only the cluster knows.
    return devices != ELASTIC and parse_devices(devices, num_gpus=num_visible_gpus()) == ("cpu",)


def _family_problem(model: str) -> str | None:
    """Why a model is not computed in fp8, as its config.json tells; None too where that is on no disk of this machine."""
    card = model_card(model) or {}
    family = card.get("model_type")
    if seeing_family(model):
        return f"models that see ({seeing_family(model)}) are not computed in it"
    if carries_state(card):
        return f"the states that layers of {family} carry are not computed in it"
    if any(card.get(name) for name in _EXPERTS):
        return f"the weights of {family} are mostly experts, which are not computed in it"
    return None
