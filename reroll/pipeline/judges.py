"""Models that a run hosts for its rewards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from reroll.config.imports import import_object
from reroll.config.reward_base import RewardConfig
from reroll.config.reward_hosted import OpenedRewardConfig
from reroll.config.rewards import walk
from reroll.runtime.base import Runtime


async def open_hosts(configs: Mapping[str, RewardConfig], runtime: Runtime, stack: AsyncExitStack) -> dict[str, Any]:
    """Every model that these rewards want hosted, by the reward's path; `stack` closes them. Equal ones are one model."""
    hosts: dict[str, Any] = {}
    shared: dict[tuple[str, str], Any] = {}
    for name, node in walk(configs):
        if not isinstance(node, OpenedRewardConfig) or node.hosted is None:
            continue
        key = node.hosts, node.host_key
        if key not in shared:
            shared[key] = await import_object(node.hosts)(node, name, runtime, stack)
        hosts[name] = shared[key]
    return hosts
