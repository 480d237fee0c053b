"""What an engine's settings promise beyond their types, and whether weights can take the way to it that the config names."""

from __future__ import annotations

from collections.abc import Iterator

from reroll.config.host import model_card, num_visible_gpus, parse_devices
from reroll.config.parts import ELASTIC, Devices, EmbeddedEngineConfig, LocalRuntimeConfig
from reroll.config.pipeline import PipelineConfig
from reroll.config.recurrent import carries_state
from reroll.config.registry import entry_names, load_entry, package_violations
from reroll.config.tree import RlvrConfig
from reroll.errors import Violation


def engine_violations(config: RlvrConfig) -> Iterator[Violation]:
    """Where an engine cannot run as asked."""
    yield from package_violations("engine", config.engine)
    yield from config.engine.violations(config)
    if (draft := getattr(config.engine, "draft", "off")) != "off":  # Other kinds have drafts of their own, or none.
        card = model_card(config.policy.model) or {}
        if carries_state(card):
            problem = f"is {draft}, but a wrong draft stays in the state that layers of {card['model_type']} carry"
            yield Violation("engine.draft", problem, "set it to off")
    if config.engine.precision == "fp8" and "fp8" not in entry_names("reroll.precisions"):
        yield Violation("engine.precision", "is fp8, which no installed package has", "reinstall reroll: pip install -e .")
    if config.policy.replay_routes:
        yield from _routes_violations(config)


def _routes_violations(config: RlvrConfig) -> Iterator[Violation]:
    """What keeps the experts that the engine chose from being replayed."""
    where, fix = "policy.replay_routes", "leave it out"
    if not config.engine.tells_routes:
        problem = f"is set, but an engine of kind {config.engine.kind} does not tell here which experts it chose"
        yield Violation(where, problem, f"{fix}, or set engine.kind to embedded")
    card = model_card(config.policy.model)
    why_not_replayed = load_entry("reroll.routes", "families")
    if card is not None and why_not_replayed and (reason := why_not_replayed(card)):
        yield Violation(where, f"is set, but {reason}", fix)


def exact_violations(config: PipelineConfig) -> Iterator[Violation]:
    """What keeps trainer and engine from being equal to the bit, where that is asked for."""
    policy = config.policy
    if not policy.exact:
        return
    if not isinstance(config, RlvrConfig):
        yield Violation("policy.exact", f"pipeline {config.pipeline} has no engine to be equal to", "leave it out")
        return
    engine = config.engine
    if not isinstance(engine, EmbeddedEngineConfig):
        yield Violation("policy.exact", f"engine {engine.kind} adds up in ways of its own", "set engine.kind to embedded")
    if engine.precision not in ("same", policy.strategy.precision):
        problem = f"the engine rounds to {engine.precision}, the trainer to {policy.strategy.precision}"
        yield Violation("policy.exact", problem, "set engine.precision to same")
    if policy.strategy.kind != "torch":
        problem = f"the ranks of strategy {policy.strategy.kind} add up in ways of their own"
        yield Violation("policy.exact", problem, "set policy.strategy.kind to torch")
    if not isinstance(config.runtime, LocalRuntimeConfig):
        problem = f"on runtime {config.runtime.kind} trainer and engine may have other numbers of threads, or other machines"
        yield Violation("policy.exact", problem, "set runtime.kind to local")
    if config.rollout.max_staleness and not engine.reads_again:
        problem = "with a staleness budget, requests in flight go on from what older weights have read"
        yield Violation("policy.exact", problem, "set engine.new_weights to read_again, or rollout.max_staleness to 0")
    chosen = bool(num_visible_gpus())
    on_gpu = [chosen if gpus is None else bool(gpus) for gpus in map(_gpus, (policy.devices, engine.devices))]
    if len({*on_gpu}) > 1:
        problem = "a CPU and a GPU add up in different ways, and policy and engine would not be on the same"
        yield Violation("policy.exact", problem, "give policy.devices and engine.devices GPUs, or cpu, both")


def weights_violations(config: RlvrConfig) -> Iterator[Violation]:
    """What keeps weights from travelling as asked, as far as it can be told before anything starts."""
    weights, is_local = config.weights, isinstance(config.runtime, LocalRuntimeConfig)
    if is_local and weights.kind not in ("auto", "shared"):
        problem = f"is {weights.kind}, but the local runtime is one process, where weights are passed by reference"
        yield Violation("weights.kind", problem, "leave it out, or set runtime: {kind: processes}")
    if not is_local and weights.kind == "shared":
        yield Violation("weights.kind", "is shared, but policy and engine run in processes of their own", "set it to auto")
    if weights.delta and is_local:
        yield Violation("weights.delta", "is set, but inside one process nothing is sent", "leave it out")
    if weights.folder is not None and weights.kind != "disk":
        yield Violation("weights.folder", f"is set, but kind {weights.kind} writes no files", "set weights.kind to disk")
    if not is_local:
        yield from _devices(config)


def _devices(config: RlvrConfig) -> Iterator[Violation]:
    policy, engine = _gpus(config.policy.devices), _gpus(config.engine.devices)
    if policy is None or engine is None:
        return  # Chosen when the run starts; then the way is checked too.
    if config.policy.strategy.kind == "torch":
        policy = policy[:1]
    if config.weights.kind == "broadcast" and (set(policy[:1]) & set(engine) or bool(policy) != bool(engine)):
        yield Violation(
            "weights.kind",
            "is broadcast, which takes one process per GPU and no CPUs among them, but policy and engine share or mix",
            "set it to auto, or give them GPUs of their own",
        )
    if config.weights.kind == "ipc" and (not set(engine) <= set(policy) or bool(policy) != bool(engine)):
        problem = "is ipc, but an engine sits where no rank of the policy does"
        yield Violation("weights.kind", problem, "set it to auto, or take engine.devices from policy.devices")


def _gpus(value: Devices) -> tuple[str, ...] | None:
    """The GPUs that are named, none for the CPU; None where they are chosen later, or cannot be read (told elsewhere)."""
    if value in ("auto", ELASTIC):
        return None
    try:
        return tuple(device for device in parse_devices(value) if device != "cpu")
    except ValueError:
        return None
