"""Engines that come and go with the nodes of a cluster (`engine.devices: elastic`): where they begin, and what they need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from reroll.config.parts import ELASTIC, Devices
from reroll.config.tree import RlvrConfig
from reroll.errors import NoRoom, Violation


def elastic_violations(config: RlvrConfig) -> Iterator[Violation]:
    """What keeps engines from joining as asked."""
    engine = config.engine
    if engine.devices != ELASTIC:
        if engine.max_workers is not None:
            yield Violation(
                "engine.max_workers", "is set, but no engine joins", "leave it out, or set engine.devices to elastic"
            )
        return
    if not config.runtime.spans_nodes:
        problem = f"is elastic, and the {config.runtime.kind} runtime is one machine, which does not grow"
        yield Violation("engine.devices", problem, "set runtime: {kind: ray}, or name devices")
    if engine.max_workers is not None and engine.max_workers < engine.num_workers:
        problem = f"{engine.max_workers} is less than engine.num_workers, with which the run begins"
        yield Violation("engine.max_workers", problem, f"set it to {engine.num_workers} or more, or leave it out")
    for where, model in config.named_models():
        if model.devices == "auto":
            problem = "is auto, and elastic engines take the GPUs that no model names"
            yield Violation(f"{where}.devices", problem, "name them, e.g. 0-3, or cpu")


def begin_elastic(config: RlvrConfig, devices_of: Callable[[Devices], tuple[str, ...]]) -> RlvrConfig:
    """The config with named devices in the place of `elastic`: the first GPUs that no model names, or the CPU where there are
    none. Others may join the engines that begin there, up to `max_workers`.

    `devices_of` looks devices up where the run is to be. Raises NoRoom if there are too few.
    """
    engine = config.engine
    if engine.devices != ELASTIC:
        return config
    taken = {device for _, model in config.named_models() for device in devices_of(model.devices)}
    everything = devices_of("auto")
    devices: Devices = "cpu"
    if everything != ("cpu",):
        spare, num_needed = [gpu for gpu in everything if gpu not in taken], engine.num_workers * engine.gpus_per_worker
        if len(spare) < num_needed:
            raise NoRoom(
                f"elastic engines begin on {num_needed} GPUs that no model names, and of {len(everything)} there are "
                f"{len(spare)} left: name fewer for the models, lower engine.num_workers, or start more nodes first"
            )
        devices = [int(gpu) for gpu in spare[:num_needed]]
    changes = {"devices": devices, "max_workers": engine.max_workers or sys.maxsize}
    return config.model_copy(update={"engine": engine.model_copy(update=changes)})
