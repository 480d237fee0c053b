"""One reward on one row and a few answers, with all that the reward needs to run: what `reroll rewards try` shows."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from reroll.config.data import NamedColumnsConfig, RowSourceConfig
from reroll.config.rewards import RewardWorkersConfig, walk, wants_host
from reroll.data.sources import load_source
from reroll.errors import DataError, RewardError
from reroll.rewards.cluster import RewardCluster
from reroll.runtime.local import LocalRuntime
from reroll.testing import trajectory_of
from reroll.types import Prompt, Score
from reroll_zoo.load_part import AskedReward


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTrial:
    """What became of one answer."""

    text: str
    score: Score | None
    problem: str
    """Why there is no score."""
    seconds: float


async def try_reward(asked: AskedReward, prompt: Prompt, texts: Sequence[str]) -> list[RewardTrial]:
    """Judge the texts as answers to the prompt, one after the other. Raises ConfigError if the reward cannot be made."""
    async with LocalRuntime() as runtime, AsyncExitStack() as stack:
        configs, hosts = {asked.name: asked.node}, None
        if any(wants_host(node) for _, node in walk(configs)):
            from reroll.pipeline.judges import open_hosts  # It loads torch, which takes longer than most rewards.

            hosts = await open_hosts(configs, runtime, stack)
        workers = RewardWorkersConfig(num_processes=1)
        rewards = await RewardCluster.start(runtime, configs, workers=workers, hosts=hosts, config_folder=asked.folder)
        stack.push_async_callback(rewards.close)
        return [await _verdict(rewards, prompt, text) for text in texts]


async def _verdict(rewards: RewardCluster, prompt: Prompt, text: str) -> RewardTrial:
    score, problem = None, ""
    start_s = time.perf_counter()
    try:
        score = await rewards.score(prompt, trajectory_of(text))
    except RewardError as error:
        problem = str(error)
    return RewardTrial(text=text, score=score, problem=problem, seconds=time.perf_counter() - start_s)


def row_in_file(asked: AskedReward, place: str) -> Prompt:
    """The prompt in `FILE` or `FILE:N`, a line of a JSONL file or a row of a Parquet file, counted from 1. Raises DataError."""
    name, colon, number = place.rpartition(":")
    file, index = (name, int(number)) if colon and number.isdecimal() else (place, 1)
    if index < 1:
        raise DataError(f"{place}: rows are counted from 1")
    kind = "parquet" if file.endswith(".parquet") else "jsonl"
    given: dict[str, Any] = {"kind": kind, "path": Path(file), "limit": index, **_columns(asked)}
    prompts = load_source(TypeAdapter(RowSourceConfig).validate_python(given))
    if len(prompts) < index:
        raise DataError(f"{file} has {len(prompts)} rows: there is no row {index}")
    return prompts[index - 1]


def row_in_json(asked: AskedReward, text: str) -> Prompt:
    """The prompt of a row that is given as JSON. What was asked may be left out. Raises DataError."""
    try:
        row = json.loads(text)
    except ValueError as error:
        raise DataError(f"--json is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError('--json holds no object: write e.g. \'{"prompt": "1 + 1 = ?", "answer": "2"}\'')
    columns = _columns(asked)
    if not {columns.get("prompt_key", "prompt"), columns.get("messages_key", "messages")} & row.keys():
        row[columns.get("prompt_key", "prompt")] = "(no prompt)"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.jsonl"
        file.write_text(json.dumps(row))
        return row_in_file(asked, str(file))


def first_row(asked: AskedReward) -> Prompt:
    """The first row of the reward's domain in its file. Raises DataError."""
    if not asked.sources:
        raise DataError(f"no row to judge: give one with --row FILE:N or --json (no data of domain {asked.name} is known)")
    return load_source(asked.sources[0].model_copy(update={"limit": 1}))[0]


def _columns(asked: AskedReward) -> Mapping[str, Any]:
    """The domain, and what the columns of its rows are called."""
    table = next((source for source in asked.sources if isinstance(source, NamedColumnsConfig)), None)
    named = table.model_dump(include={"prompt_key", "messages_key", "answer_key", "answer_after", "system"}) if table else {}
    return {"domain": asked.name, **named}
