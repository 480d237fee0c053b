"""Which transport weights take, given the locations of trainers and engines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from reroll.config.weights import WeightsKind
from reroll.errors import WeightsError
from reroll.weights.bucket import ProcessLocation, TransportKind

CPU = "cpu"


def choose_transport(
    wanted: WeightsKind, trainers: Sequence[ProcessLocation], engines: Mapping[int, ProcessLocation]
) -> TransportKind:
    """The transport that was asked for, if it can work; `auto` is the fastest that can.

    Shared memory where every engine has a trainer on its device, a collective where none has, else the runtime's store,
    which works everywhere. Raises WeightsError, with the fix, for what cannot work.
    """
    beside = all(colocated_rank(trainers, engine) is not None for engine in engines.values())
    on_gpus = CPU not in {place.device for place in (trainers[0], *engines.values())}
    on_cpus = {place.device for place in (trainers[0], *engines.values())} == {CPU}
    apart = trainers[0].device not in {engine.device for engine in engines.values()}
    apart = apart and len({engine.device for engine in engines.values()}) == len(engines)
    collective = on_cpus or (on_gpus and apart)
    if wanted == "auto":
        return "ipc" if beside else "broadcast" if on_gpus and collective else "store"
    if wanted == "ipc" and not beside:
        raise WeightsError(
            "weights.kind ipc: an engine shares neither its GPU nor, on a CPU, its machine with the policy, and so cannot "
            "see its memory: set weights.kind to auto"
        )
    if wanted == "broadcast" and not collective:
        raise WeightsError(
            "weights.kind broadcast: a process group has one process per GPU, and either only GPUs or none, but policy and "
            "engines share a GPU or mix: set weights.kind to auto"
        )
    assert wanted != "shared"  # Refused by the checks: workers of other processes share nothing.
    return wanted


def colocated_rank(trainers: Sequence[ProcessLocation], engine: ProcessLocation) -> int | None:
    """The rank of a trainer whose memory this engine can see: on its GPU, or, on a CPU, on its host."""
    if engine.device == CPU and not hasattr(os, "memfd_create"):
        return None
    return next((rank for rank, place in enumerate(trainers) if place.can_share_memory_with(engine)), None)
