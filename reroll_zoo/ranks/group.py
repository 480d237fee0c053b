"""The process group of the ranks that hold one model together: how they meet, and what they agree on in it.

The controller opens a store and tells every rank its address. Nothing is read from the environment, and the store
outlives any rank, so that a lost rank is an error of its own and not a lost store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, HashStore, Store, TCPStore  # type: ignore[attr-defined]

from reroll.errors import ModelError, RerollError
from reroll.training.base import DataParallel

T = TypeVar("T")

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)
"""For all ranks to have come: some machines load their libraries slowly."""
COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""The first rank may write a large folder while the others wait. A rank that failed does not take so long: the controller
ends the others itself."""


def join_process_group(address: str | None, *, rank: int, world_size: int, device: str) -> None:
    """Join the other ranks of this role. One rank alone needs no address. A process belongs to one role only."""
    if address is None and world_size > 1:
        raise ValueError(f"{world_size} ranks have no rendezvous: spawn them with the address of one")
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    store: Store = HashStore()
    if address is not None:
        host, _, port = address.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, timeout=RENDEZVOUS_TIMEOUT)
        _wait_for_all(store, rank=rank, world_size=world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)


def _wait_for_all(store: Store, *, rank: int, world_size: int) -> None:
    store.set(f"here/{rank}", "")
    try:
        store.wait([f"here/{other}" for other in range(world_size)], RENDEZVOUS_TIMEOUT)
    except DistStoreError as error:
        minutes = RENDEZVOUS_TIMEOUT.total_seconds() / 60
        raise RerollError(
            f"not all {world_size} ranks of this model started within {minutes:g} minutes: look for the worker that failed"
        ) from error


@contextmanager
def leaving_on_error() -> Iterator[None]:
    """If the block raises, leave the group, so that ranks which wait for this one fail too."""
    try:
        yield
    except BaseException:
        dist.destroy_process_group()
        raise


def only_first(make: Callable[[], T]) -> T | None:
    """What the first rank makes; None on the others. If it fails, so do all: none waits for what will not come."""
    made: T | None = None
    failure: Exception | None = None
    words: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            made = make()
        except Exception as error:
            failure, words = error, [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(words, src=0)
    if failure is not None:
        raise failure
    if words[0] is not None:
        raise ModelError(f"the first rank could not load the model: {words[0]}")
    return made


class DataParallelRanks(DataParallel):
    """All ranks of the process group; `ranks_per_share` neighbours see the same data and count as one."""

    def __init__(self, *, ranks_per_share: int) -> None:
        self.rank, self.size = dist.get_rank() // ranks_per_share, dist.get_world_size() // ranks_per_share

    def largest(self, count: int) -> int:
        largest = torch.tensor(count)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)
