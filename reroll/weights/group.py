"""The process group of a push, apart from the trainer's own groups: one sender, and the engines that receive."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]

from reroll.weights.bucket import GroupRank

TIMEOUT = timedelta(minutes=2)
"""For all members to come, and for one bucket to arrive. A member that died is noticed sooner: its connections close."""


class BroadcastGroup:
    """Broadcasts bytes from rank 0 to all others: NCCL on GPUs, else gloo."""

    def __init__(self, group_rank: GroupRank, device: torch.device) -> None:
        host, _, port = group_rank.address.rpartition(":")
        # The store counts who comes to it: a prefix keeps groups that meet here one after the other apart.
        store = PrefixStore(group_rank.name, TCPStore(host, int(port), is_master=False, timeout=TIMEOUT))
        if device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL  # Builds for CPUs lack it.

            torch.cuda.set_device(device)
            options = ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group: Any = ProcessGroupNCCL(store, group_rank.rank, group_rank.size, options)
        else:
            self._group = ProcessGroupGloo(store, group_rank.rank, group_rank.size, timeout=TIMEOUT)

    def broadcast(self, flat: Tensor) -> Work:
        """Begin to send these bytes (rank 0), or to fill them (the others); they are not to be touched until it is done."""
        work: Work = self._group.broadcast(flat, 0)
        return work

    def leave(self) -> None:
        """Give the connections up; whoever waits for them fails. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # This ends what NCCL has under way; gloo closes connections when the last reference goes.
