"""Environment steps a second through reroll's environment plane. Usage: reroll_envs.py frozen_lake|sokoban|gymnasium"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from env_work import GYMNASIUM_ID, IN_FLIGHT, NUM_EPISODES
from plane import Task, open_cluster, play_all, play_bare

from reroll.config.envs import EnvDomainConfig
from reroll_zoo.adapters.config import GymnasiumConfig
from reroll_zoo.games.frozen_lake import FrozenLakeConfig
from reroll_zoo.games.grid import ACTIONS
from reroll_zoo.games.sokoban import SokobanConfig

MAX_TURNS = 128
"""More than any of the environments allows itself."""
TASKS = {
    "frozen_lake": Task(EnvDomainConfig(env=FrozenLakeConfig(), max_turns=MAX_TURNS), ACTIONS),
    "sokoban": Task(EnvDomainConfig(env=SokobanConfig(), max_turns=MAX_TURNS), ACTIONS),
    "gymnasium": Task(EnvDomainConfig(env=GymnasiumConfig(env_id=GYMNASIUM_ID), max_turns=MAX_TURNS), ("0", "1", "2", "3")),
}


async def measure(task: Task, kind: str, num_in_flight: int) -> tuple[float, int]:
    with tempfile.TemporaryDirectory() as folder:
        async with open_cluster(task, kind=kind, max_live=num_in_flight) as cluster:
            await play_all(cluster, task, Path(folder), num_steps=1, prompts_per_step=num_in_flight)  # Warms up.
            num_steps = NUM_EPISODES // num_in_flight
            return await play_all(cluster, task, Path(folder), num_steps=num_steps, prompts_per_step=num_in_flight)


def main() -> None:
    task = TASKS[sys.argv[1]]
    play_bare(task, num_episodes=16)  # Warms up.
    wall_s, num_turns = play_bare(task, num_episodes=NUM_EPISODES)
    steps_per_s = {"bare loop/1": num_turns / wall_s}
    for kind in ("inline", "threads", "processes"):
        for num_in_flight in IN_FLIGHT:
            wall_s, num_played = asyncio.run(measure(task, kind, num_in_flight))
            if num_played != num_turns:
                raise SystemExit(f"{kind} played {num_played} steps, the bare loop {num_turns}: an episode failed")
            steps_per_s[f"{kind}/{num_in_flight}"] = num_turns / wall_s
    print("RESULT " + json.dumps(steps_per_s), flush=True)


if __name__ == "__main__":
    main()
