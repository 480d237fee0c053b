"""Environment steps a second through the whole plane: workers, scheduler and episodes, with a policy that answers at once.

The bundled games against a bare loop, and Gymnasium's FrozenLake-v1 against RLlib's env runner, in one run.
`python benchmarks/environments.py [--rllib FOLDER]`; the peer's environment is made in FOLDER on first use, and reroll
plays Gymnasium there too: the same interpreter and the same Gymnasium for both.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from env_work import GYMNASIUM_ID, NUM_EPISODES
from report import arguments, report
from side_by_side import HERE, Contestant, own_python, peer_python, run_once

Rates = dict[str, list[float]]
"""Steps a second, one number a round, by `runner/episodes in flight`."""

GAMES = ("frozen_lake", "sokoban")
PEER = "RLlib"
PEER_WITHOUT_POLICY = "RLlib, no policy"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rllib", type=Path, default=Path(".venv-rllib"), help="where RLlib's environment is or will be")
    args = parser.parse_args()
    peer, peers = peer_python("rllib", args.rllib.resolve()), HERE / "peers"
    ours = str(peers / "reroll_envs.py")
    contestants = [
        *(Contestant(game, own_python(), (ours, game)) for game in GAMES),
        Contestant("gymnasium", peer, (ours, "gymnasium")),
        Contestant(PEER, peer, (str(peers / "rllib_envs.py"),)),
    ]
    rates = measure(contestants, rounds=args.rounds)
    note = f"median of {args.rounds} interleaved rounds"
    rows = [row for game in GAMES for row in game_rows(game, rates[game])]
    title = f"{NUM_EPISODES} episodes of each bundled game, random actions"
    report(
        "environments", rows, title=title, note=note, facts={"spread": {game: rates[game] for game in GAMES}}, save=args.save
    )
    title = f"Gymnasium's {GYMNASIUM_ID} through reroll and through RLlib's env runner, random actions"
    note += "; RLlib's environment is wrapped to read and write text as reroll's does, unless it says no text"
    both = {**rates["gymnasium"], **rates[PEER]}
    report("environments_rllib", peer_rows(both), title=title, note=note, facts={"spread": both}, save=args.save)


def measure(contestants: list[Contestant], *, rounds: int) -> dict[str, Rates]:
    """Rates by contestant. Rounds interleave, so a slow minute of the machine hits all alike."""
    rates: dict[str, Rates] = {contestant.name: defaultdict(list) for contestant in contestants}
    for number in range(rounds):
        for contestant in contestants:
            for runner, steps_per_s in run_once(contestant).items():
                rates[contestant.name][runner].append(steps_per_s)
            print(f"round {number + 1}: {contestant.name} done", flush=True)
    return rates


def game_rows(game: str, rates: Rates) -> list[dict[str, Any]]:
    return [{"game": game, **row(key, rates), "of_bare": ratio(rates, key, "bare loop/1")} for key in rates]


def peer_rows(rates: Rates) -> list[dict[str, Any]]:
    """Each row beside the peer with as many episodes in flight, with a policy and without."""
    return [
        {
            **row(key, rates),
            "times_rllib": ratio(rates, key, f"{PEER}/{in_flight}"),
            "times_rllib_no_policy": ratio(rates, key, f"{PEER_WITHOUT_POLICY}/{in_flight}"),
        }
        for key in rates
        for in_flight in [key.rpartition("/")[2]]
    ]


def row(key: str, rates: Rates) -> dict[str, Any]:
    runner, _, in_flight = key.rpartition("/")
    return {
        "runner": runner,
        "in_flight": int(in_flight),
        "steps_per_s": statistics.median(rates[key]),
        "slowest": min(rates[key]),
        "fastest": max(rates[key]),
    }


def ratio(rates: Rates, key: str, other: str) -> float:
    return statistics.median(rates[key]) / statistics.median(rates[other])


if __name__ == "__main__":
    main()
