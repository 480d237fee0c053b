"""A language model learns to play: FrozenLake, Sokoban, both at once, or shopping, turn by turn.

A solver plays some games, and the model imitates it just long enough to play at all. Then it plays by itself: an episode
is a game, and what it earns there is all that it is told.

    python examples/games.py frozen_lake                     # a tiny transformer on a CPU, in minutes
    python examples/games.py sokoban --seed 1
    python examples/games.py mixed                           # FrozenLake and Sokoban, one policy
    python examples/games.py webshop --setup smollm2         # SmolLM2-135M: wants a GPU
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console

from reroll.config.envs import EnvDomainConfig
from reroll.config.load import load_config
from reroll.config.tree import RlvrConfig
from reroll.envs.make import make_env
from reroll.pipeline.run import train
from reroll_zoo.games.frozen_lake import FrozenLakeConfig
from reroll_zoo.games.grid import ACTIONS, grammar
from reroll_zoo.games.sokoban import SokobanConfig
from reroll_zoo.tiny_models import make_tiny

HERE = Path(__file__).parent / "games"
FIRST_DEMONSTRATION = 500_000
"""Seeds of demonstrations: neither those that RL plays (from 0) nor the held-out ones (from 1,000,000)."""
NUM_DEMONSTRATIONS = 12000
"""Of each game: more than imitation reads, so that nothing is learned by heart."""


def write_demonstrations(entry: EnvDomainConfig, num: int, file: Path) -> None:
    """Games that the environment's solver plays, as conversations to imitate."""
    answer = "{action}" if entry.actions.kind == "text" else "<answer>{action}</answer>"
    rule = "" if entry.actions.kind == "text" else " Write your action as <answer>...</answer>."
    env = make_env(entry.env)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as out:
        for seed in range(FIRST_DEMONSTRATION, FIRST_DEMONSTRATION + num):
            first, *others = env.demonstration(seed, answer=answer)
            messages = [{**first, "content": first["content"] + rule}, *others]
            out.write(json.dumps({"messages": messages}) + "\n")


def tiny_words(entries: Iterable[EnvDomainConfig]) -> tuple[str, ...]:
    """What is one token to the tiny model: a move; a cell with the space or line break after it; the wall around a room;
    what is said to a turn without a valid action.

    Written in characters, a room and a few moves are three times as long, and a step of training takes as much longer.
    """
    words = {word for action in ACTIONS for word in (action, f", {action}")}
    for entry in entries:
        assert isinstance(entry.env, FrozenLakeConfig | SokobanConfig)
        words.add(f" is no action here. {grammar(entry.env.actions_per_turn)}")
        words |= {cell + end for cell in entry.env.symbols.model_dump().values() for end in " \n"}
        if isinstance(entry.env, SokobanConfig):
            wall = entry.env.symbols.wall
            row = " ".join(wall * entry.env.columns)
            words |= {f"{row}\n{wall} ", f"{wall}\n{wall} ", f"{wall}\n{row}"}
    return tuple(sorted(words))


def wins(evaluation: Mapping[str, float], games: Iterable[str]) -> dict[str, float]:
    """The share of held-out games won, by game."""
    return {game: evaluation.get(f"eval/{game}/pass@1", evaluation["eval/pass@1"]) for game in games}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", choices=("frozen_lake", "sokoban", "mixed", "webshop"))
    parser.add_argument("--setup", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="RL steps, if not those of the YAML")
    parser.add_argument("--imitate", type=int, help="steps of imitation, if not those of the YAML")
    parser.add_argument("overrides", nargs="*", help="key=value, for RL")
    args = parser.parse_intermixed_args()
    console, started, work = Console(), time.perf_counter(), Path("runs") / f"{args.game}-{args.setup}-data"
    rl_file, sft_file = HERE / args.setup / f"{args.game}.yaml", HERE / args.setup / f"{args.game}_sft.yaml"
    seed = f"run.seed={args.seed}"

    console.rule(f"1. imitate a solver of {args.game}")
    config = load_config(rl_file, ["policy.model=any/model"])
    assert isinstance(config, RlvrConfig)
    envs, sources = config.envs, []
    for number, (game, entry) in enumerate(envs.items()):
        write_demonstrations(entry, NUM_DEMONSTRATIONS, work / f"{game}.jsonl")
        sources.append(f"data.train.{number}.path={work / f'{game}.jsonl'}")
    if args.setup == "tiny":
        make_tiny(work / "tiny", hidden=96, layers=4, heads=4, kv_heads=4, words=tiny_words(envs.values()), seed=args.seed)
    start = [f"policy.model={work / 'tiny'}"] if args.setup == "tiny" else []
    length = [f"run.steps={args.imitate}"] if args.imitate else []
    warm = train(load_config(sft_file, [seed, *start, *length, *sources]), overwrite=True)
    if warm.interrupted:
        return

    console.rule("2. play")
    length = [f"run.steps={args.steps}"] if args.steps else []
    overrides = [seed, *length, f"policy.model={warm.checkpoint}", *args.overrides]
    outcome = train(load_config(rl_file, overrides), overwrite=True)
    first, last = outcome.evals[min(outcome.evals)], outcome.evals[max(outcome.evals)]
    seconds = time.perf_counter() - started
    result = {"game": args.game, "setup": args.setup, "seed": args.seed, "before": first, "after": last, "seconds": seconds}
    (outcome.folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    before, after = wins(first, envs), wins(last, envs)
    for game in envs:
        rates = f"[red]{before[game]:.3f}[/] → [green]{after[game]:.3f}[/]"
        console.print(f"held-out games of {game} won: {rates}", highlight=False)
    console.print(f"  {seconds:.0f} s in all", highlight=False)
    console.print(f"  {outcome.folder / 'curve.png'}", highlight=False)
    console.print(f"  {outcome.checkpoint}: the trained model, an ordinary Hugging Face folder", highlight=False)


if __name__ == "__main__":
    main()
