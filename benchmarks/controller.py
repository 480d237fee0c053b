"""What the controller carries and what it costs: bytes per sample and per step, and a step's overhead by number of workers.

Engines and trainers are fakes that answer at once. The runtime, the router, the scheduler, the packing and the cut into
shares are the real ones, and every message is really serialised, as Ray would, to be counted.
Run: python benchmarks/controller.py [--runtime processes|ray] [--workers 1 4 16 64]
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from fakes import Prompts
from report import arguments, report

from reroll.config.parts import LocalRuntimeConfig, ProcessesRuntimeConfig, RolloutConfig, RuntimeConfig
from reroll.infer.base import Finished
from reroll.infer.cluster import CONCURRENCY, InferCluster
from reroll.infer.worker import Command, EngineReport, EngineStatus, Submit
from reroll.observe.journal import Journal
from reroll.observe.metrics import Mean, Stats
from reroll.rollout.scheduler import RolloutScheduler
from reroll.runtime import make_runtime
from reroll.runtime.base import Calls, Placement, Runtime, WorkerInfo, Workers
from reroll.tokens.batch import pack
from reroll.tokens.samples import rows_of
from reroll.training.cluster import TrainCluster, TrainJob
from reroll.training.loss import PolicyLoss
from reroll.types import Completion, FinishReason, Prompt, Request, SamplingParams, Score, Status, Trajectory, Turn
from reroll_zoo.ray.config import RayRuntimeConfig

NUM_STEPS = 4
PROMPTS_PER_STEP, GROUP_SIZE = 32, 8
PROMPT_TOKENS, COMPLETION_TOKENS = 128, 512
LOSS = PolicyLoss(kind="ppo", options={"clip_low": 0.2, "clip_high": 0.2})


class InstantEngine:
    """Finishes every request at once."""

    def __init__(self, info: WorkerInfo) -> None:
        self._finished: list[Finished] = []
        self._changed = threading.Condition()

    def exchange(self, commands: Sequence[Command], *, wait_s: float) -> EngineReport:
        with self._changed:
            self._finished += [
                Finished(order.request.id, _written(order.request)) for order in commands if isinstance(order, Submit)
            ]
            if commands:
                self._changed.notify_all()
                events: list[Finished] = []  # The call that waits brings them.
            else:
                self._changed.wait_for(lambda: self._finished, wait_s)
                events, self._finished = self._finished, []
        status = EngineStatus(
            num_tokens=0, num_prefill_tokens=0, num_reused_tokens=0, num_steps=0, busy_s=0.0, num_unfinished=0, max_running=1
        )
        return EngineReport(tuple(events), status)


def _written(request: Request) -> Completion:
    ids = tuple((request.sampling.seed + place) % 150_000 for place in range(COMPLETION_TOKENS))
    logprobs = tuple(-0.001 * place for place in range(COMPLETION_TOKENS))
    return Completion(token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP, versions=((0, COMPLETION_TOKENS),))


class InstantTrainer:
    """Learns nothing, at once."""

    def __init__(self, info: WorkerInfo) -> None:
        pass

    def train(self, job: TrainJob) -> Stats:
        return Stats({"loss": Mean(float(len(job.steps)))})


class Metered(Workers[Any]):
    """Workers whose messages are weighed, by method: what goes out once for all who are given the same, and what comes back."""

    def __init__(self, workers: Workers[Any]) -> None:
        super().__init__(workers.size)
        self._workers = workers
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    async def one(self, rank: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.sent[method.__name__] += num_bytes((args, kwargs))
        return await self._weighed(method, self._workers.one(rank, method, *args, **kwargs))

    def scatter(self, method: Callable[..., Any], shards: Sequence[Any]) -> Calls[Any]:
        self.sent[method.__name__] += sum(num_bytes(shard) for shard in {id(shard): shard for shard in shards}.values())
        return Calls(self._weighed(method, call) for call in self._workers.scatter(method, shards))

    async def _restart(self, rank: int) -> None:
        await self._workers.restart(rank)

    async def stop(self, *, at_once: bool = False) -> None:
        await self._workers.stop(at_once=at_once)

    async def _weighed(self, method: Callable[..., Any], call: Awaitable[Any]) -> Any:
        self.calls[method.__name__] += 1
        answer = await call
        self.received[method.__name__] += num_bytes(answer)
        return answer


def num_bytes(message: Any) -> int:
    """As it travels: the pickle, and the arrays beside it."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    return len(body) + sum(buffer.raw().nbytes for buffer in buffers)


async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
    return Score(value=float(len(trajectory.id) % 2))


async def measure(runtime: Runtime, folder: Path, *, num_workers: int, is_weighed: bool) -> dict[str, Any]:
    """Steps through `num_workers` engines and as many train ranks."""
    places = ("cpu",) * num_workers
    engines = await runtime.spawn(InstantEngine, Placement("engine", places, concurrency=CONCURRENCY))
    trainers = await runtime.spawn(InstantTrainer, Placement("policy", places))
    if is_weighed:
        engines, trainers = Metered(engines), Metered(trainers)
    engine, policy = InferCluster(engines), TrainCluster(trainers)  # type: ignore[arg-type]

    async def episode(prompt: Prompt, id: str, seed: int) -> Trajectory:
        prompt_ids = (int(prompt.id.rpartition("/")[2]), *range(PROMPT_TOKENS - 1))
        request = Request(id=id, prompt_ids=prompt_ids, sampling=SamplingParams(max_tokens=COMPLETION_TOKENS, seed=seed))
        turn = Turn(prompt_ids=prompt_ids, completion=await engine.generate(request), text="")
        return Trajectory(id=id, turns=(turn,), status=Status.COMPLETED)

    config = RolloutConfig(prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE)
    whole_bytes, seconds = 0, []
    with Journal(folder / f"{num_workers}-{is_weighed}.jsonl") as journal:
        scheduler = RolloutScheduler(config, Prompts(), episode=episode, score=score, journal=journal, seed=0)
        for step in range(NUM_STEPS):
            started_s = time.perf_counter()
            groups = await scheduler.take(PROMPTS_PER_STEP)
            batch = pack(rows_of(groups)[0])
            await policy.train(batch, LOSS, seed=step)
            scheduler.release(groups, version=step + 1)
            seconds.append(time.perf_counter() - started_s)
            whole_bytes += num_bytes(batch) if is_weighed else 0
        await scheduler.close()
    await engine.close()
    await policy.close()
    if not isinstance(engines, Metered) or not isinstance(trainers, Metered):
        return {"step_ms": 1e3 * min(seconds)}
    return {
        "engine_calls_per_step": engines.calls["exchange"] / NUM_STEPS,
        "to_engines": engines.sent["exchange"],
        "from_engines": engines.received["exchange"],
        "to_trainers": trainers.sent["train"],
        "if_sent_whole": whole_bytes * num_workers,
    }


def runtime_of(kind: str, num_workers: int) -> RuntimeConfig:
    if kind == "local":
        return LocalRuntimeConfig()
    return RayRuntimeConfig(kind="ray", num_cpus=2 * num_workers) if kind == "ray" else ProcessesRuntimeConfig(kind="processes")


async def measure_all(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    num_samples = NUM_STEPS * PROMPTS_PER_STEP * GROUP_SIZE
    rows = []
    for num_workers in args.workers:
        async with make_runtime(runtime_of(args.runtime, num_workers)) as runtime:
            weighed = await measure(runtime, folder, num_workers=num_workers, is_weighed=True)
            timed = await measure(runtime, folder, num_workers=num_workers, is_weighed=False)
        rows.append(
            {
                "workers": num_workers,
                "step_ms": timed["step_ms"],
                "engine_calls": weighed["engine_calls_per_step"],
                "request_bytes": weighed["to_engines"] / num_samples,
                "answer_bytes": weighed["from_engines"] / num_samples,
                "row_bytes": weighed["to_trainers"] / num_samples,
                "rows_mb": weighed["to_trainers"] / NUM_STEPS / 1e6,
                "rows_mb_if_whole": weighed["if_sent_whole"] / NUM_STEPS / 1e6,
            }
        )
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runtime", choices=["local", "processes", "ray"], default="local")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16, 64])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure_all(args, Path(folder)))
    tokens = PROMPT_TOKENS + COMPLETION_TOKENS
    report(
        "controller",
        rows,
        title=f"The controller, runtime {args.runtime}: {PROMPTS_PER_STEP * GROUP_SIZE} samples of {tokens} tokens a step",
        note="as many engines and train ranks as workers, which answer at once; step_ms is the fastest step; calls and MB are "
        "per step, bytes per sample; rows_mb is what the ranks are given, if_whole what it would be were each given all",
        facts={"runtime": args.runtime, "tokens_per_sample": tokens, "num_steps": NUM_STEPS},
        save=args.save,
    )


if __name__ == "__main__":
    main()
