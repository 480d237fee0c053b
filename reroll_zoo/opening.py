"""What a run would open before and in its first step, tried by `reroll check`: models without their weights, environments,
agents, the folder of the runs, and the rewards on the first rows of what they judge.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reroll.config.data import EnvSourceConfig, ImportSourceConfig, RowSourceConfig
from reroll.config.envs import EnvConfig
from reroll.config.host import model_folder
from reroll.config.parts import LoraConfig
from reroll.config.pipeline import PipelineConfig
from reroll.config.reward_base import CombinedRewardConfig, RewardConfig
from reroll.config.reward_hosted import HostedJudgeConfig, OpenedRewardConfig
from reroll.config.rewards import EnvRewardConfig, ImportRewardConfig, walk
from reroll.config.tree import RlvrConfig
from reroll.errors import DataError, ModelError, RunFolderError
from reroll.types import Prompt

NUM_ROWS = 3
"""Of each source. A column that is not there is missing from the first."""

_NOT_TRIED = (ImportRewardConfig, OpenedRewardConfig, EnvRewardConfig, CombinedRewardConfig)
"""They may ask a service, or judge nothing by themselves."""

Attempt = Callable[[], object]
"""What a run does with a part of the config, as far as that can be tried."""


def openings(config: PipelineConfig) -> Iterator[tuple[str, Attempt]]:
    """(path, attempt) of everything that can be opened without a run."""
    if config.cluster is None:  # Else it is a folder of the cluster's.
        yield "run.runs_dir", partial(_find_place, config.run.runs_dir)
    yield from _models(config)
    if not isinstance(config, RlvrConfig):
        return
    for domain, entry in config.envs.items():
        if not entry.env.is_remote:
            yield f"envs.{domain}.env", partial(_open_env, entry.env, _first_seed(config, domain))
    for domain, agent in config.agents.items():
        if agent.code is None:  # The user's code is tried anyway.
            yield f"agents.{domain}", agent.make
    prompts = _prompts(config)
    if model_folder(config.policy.model):
        for domain, asked in prompts.items():
            yield "rollout.max_prompt_tokens", partial(_show, config, domain, asked)
    for name, node in walk(config.rewards):
        judged = [
            prompt
            for domain, asked in prompts.items()
            for prompt in asked
            if name.partition(".")[0] == (domain if domain in config.rewards else "default")
        ]
        if judged and not isinstance(node, _NOT_TRIED):
            yield f"rewards.{name}", partial(_judge, node, judged)


def _find_place(runs_dir: Path) -> None:
    there = next(folder for folder in (runs_dir.absolute(), *runs_dir.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise RunFolderError(f"{there} is a file: name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunFolderError(f"{there} is not for you to write to: name another folder")


def _models(config: PipelineConfig) -> Iterator[tuple[str, Attempt]]:
    """Those that lie on this disk."""
    for where, node in config.named_models():
        if node.model is not None and model_folder(node.model):
            speaks = where == "policy" or isinstance(node, HostedJudgeConfig)
            yield f"{where}.model", partial(_open_model, node.model, speaks=speaks, lora=getattr(node, "lora", None))
    compared: dict[str, str | None] = {
        where: node.model for where, node in config.named_models() if where.startswith("teacher")
    }
    if isinstance(config, RlvrConfig):
        compared["reference"] = config.reference.model
    for where, model in compared.items():
        if model is not None and model_folder(model) and model_folder(config.policy.model):
            role = "reference" if where == "reference" else "teacher"
            yield f"{where}.model", partial(_compare, config.policy.model, model, role=role)


def _open_model(name: str, *, speaks: bool, lora: LoraConfig | None) -> None:
    """`speaks`: it writes, and is spoken to in its chat format."""
    from reroll.models.attention import check_supported
    from reroll.models.load import load_tokenizer, skeleton
    from reroll.tokens.renderer import Renderer

    tokenizer = load_tokenizer(name)
    if speaks:
        Renderer(tokenizer)
    check_supported(skeleton(name, lora=lora))
    if speaks:
        _find_weights(name)


def _find_weights(name: str) -> None:
    """By the heads of the files alone."""
    import transformers

    from reroll.models.load import quiet, resolve_base
    from reroll.models.quantized import dequantizing

    if find_spec("accelerate") is None:  # What lets transformers read no more than that.
        return
    source = resolve_base(name)
    plainly = dequantizing(source)
    with quiet():
        try:
            auto: Any = transformers.AutoModelForCausalLM
            _, found = auto.from_pretrained(source, device_map="meta", output_loading_info=True, **plainly)
        except (OSError, RuntimeError) as error:
            problem = str(error).partition("\n")[0]
            raise ModelError(f"the weights of {name} do not fit its config.json, or are not there: {problem}") from error
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"{name} lacks weights of the model it describes: {', '.join(missing[:3])}, {len(missing)} in all")


def _compare(policy: str, other: str, *, role: str) -> None:
    from reroll.models.load import shared_vocabulary

    shared_vocabulary(policy, other, role=role)


def _open_env(node: EnvConfig, seed: int) -> None:
    from reroll.envs.worker import HostedEnv, LoopThread

    loop = LoopThread()
    env = HostedEnv(node, loop, max_message_chars=1_000_000)
    try:
        env.open(seed)
        env.close()
    finally:
        loop.stop()


def _first_seed(config: RlvrConfig, domain: str) -> int:
    sources = (source for source in config.data.train if isinstance(source, EnvSourceConfig) and source.domain == domain)
    return next((source.first_seed for source in sources), 0)


def _prompts(config: RlvrConfig) -> Mapping[str, Sequence[Prompt]]:
    """The first of each source, by domain. Sources that cannot be read are told of by whoever reads them whole."""
    from reroll.data.sources import load_source

    found: dict[str, list[Prompt]] = {}
    for source in [*config.data.train, *config.data.eval]:
        if isinstance(source, RowSourceConfig) and not isinstance(source, ImportSourceConfig):
            limit = min(source.limit or NUM_ROWS, NUM_ROWS)
            with suppress(DataError):
                found[source.domain] = found.get(source.domain, []) + load_source(source.model_copy(update={"limit": limit}))
    return found


def _show(config: RlvrConfig, domain: str, prompts: Sequence[Prompt]) -> None:
    """Raises where no prompt is short enough."""
    from reroll.models.load import load_tokenizer
    from reroll.tokens.renderer import Renderer

    most = config.rollout.of(domain).max_prompt_tokens
    try:
        renderer = Renderer(load_tokenizer(config.policy.model))
    except ModelError:  # It is told of as the policy's.
        return
    shortest = min(len(renderer.start(prompt.messages)) for prompt in prompts)
    if shortest > most:
        raise DataError(
            f"is {most}, and the first prompts of domain {domain} have {shortest} tokens and more: raise it, or drop long ones"
        )


def _judge(node: RewardConfig, prompts: Sequence[Prompt]) -> None:
    """No answer makes a verifier raise, so what it raises is about the row."""
    asyncio.run(_judge_all(node, prompts))


async def _judge_all(node: RewardConfig, prompts: Sequence[Prompt]) -> None:
    from reroll.rewards.base import Inline
    from reroll.testing import trajectory_of

    reward = Inline(node.make())
    try:
        for prompt in prompts:
            await reward(prompt, trajectory_of("1"))
    finally:
        await reward.close()
