"""Every kind of reward behind one call, on every runtime."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import ray
from pydantic import TypeAdapter

from reroll.config.parts import LocalRuntimeConfig, ProcessesRuntimeConfig
from reroll.config.reward_base import RewardConfig
from reroll.config.rewards import ImportRewardConfig, RewardWorkersConfig
from reroll.errors import ConfigError, RewardError
from reroll.rewards.cluster import RewardCluster
from reroll.rewards.worker import Case
from reroll.rewards.workers import RewardWorkers
from reroll.runtime import make_runtime
from reroll.runtime.base import Runtime
from reroll.types import Completion, FinishReason, Prompt, Score, Status, Trajectory, Turn
from reroll_zoo.ray.config import RayRuntimeConfig

USER_MODULE = """
import os, subprocess, time

def parent(prompt, trajectory):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(prompt.answer, "a") as file: print(child.pid, file=file)
    if trajectory.text == "die": os._exit(1)
    if trajectory.text == "fork": return float(os.fork() >= 0)
    time.sleep(600)

def length(prompt, trajectory):
    if trajectory.text == "die": os._exit(1)
    if trajectory.text == "hang": time.sleep(600)
    return len(trajectory.text)

def whose(prompt, trajectory):
    return float(os.getpid())

def gated(prompt, trajectory):
    if trajectory.text:  # Waits until the test lets it go on.
        open(os.path.join(prompt.answer, "begun"), "w").close()
        while not os.path.exists(os.path.join(prompt.answer, "open")): time.sleep(0.02)
    return 0.0

def noted(prompt, trajectory):
    with open(os.path.join(prompt.answer, "noted"), "a") as file: file.write(trajectory.text)
    return 0.0

async def later(prompt, trajectory):
    return {"good": 1.0, "bad": -1.0}[trajectory.text]
"""


def rewards(**fields: dict[str, object]) -> dict[str, RewardConfig]:
    return TypeAdapter(dict[str, RewardConfig]).validate_python(fields)


def said(text: str) -> Trajectory:
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
    return Trajectory(id="s", turns=(Turn(prompt_ids=(0,), completion=completion, text=text),), status=Status.COMPLETED)


def asked(domain: str, answer: str | None = None) -> Prompt:
    return Prompt(id=f"{domain}/0", messages=(), domain=domain, answer=answer)


async def begun(folder: Path) -> None:
    """Until a `gated` judge is at work."""
    while not (folder / "begun").exists():
        await asyncio.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_judges.py").write_text(USER_MODULE)
    return tmp_path


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


RUNTIMES: dict[str, LocalRuntimeConfig | ProcessesRuntimeConfig | RayRuntimeConfig] = {
    "local": LocalRuntimeConfig(),
    "processes": ProcessesRuntimeConfig(kind="processes"),
    "ray": RayRuntimeConfig(kind="ray"),
}


@pytest.fixture(params=RUNTIMES)
async def runtime(request: pytest.FixtureRequest) -> AsyncIterator[Runtime]:
    if request.param == "ray":
        request.getfixturevalue("one_ray")
    async with make_runtime(RUNTIMES[request.param]) as made:
        yield made


Start = Callable[..., Awaitable[RewardCluster]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """`RewardCluster.start`, whose clusters are closed when the test is over."""
    async with AsyncExitStack() as stack:

        async def started(runtime: Runtime, configs: Mapping[str, RewardConfig], **given: Any) -> RewardCluster:
            cluster = await RewardCluster.start(runtime, configs, **given)
            stack.push_async_callback(cluster.close)
            return cluster

        yield started


async def test_each_domain_is_judged_by_its_own_reward_and_the_rest_by_default(
    runtime: Runtime, folder: Path, start: Start
) -> None:
    cluster = await start(
        runtime,
        rewards(
            math={"kind": "numeric"},
            style={"kind": "import", "path": "my_judges:length", "timeout_s": 120.0},
            hasty={"kind": "import", "path": "my_judges:length", "timeout_s": 1.0},
            default={"kind": "import", "path": "my_judges:later"},
        ),
        config_folder=folder,
        workers=RewardWorkersConfig(num_processes=2),
    )
    assert await cluster.score(asked("math", "7"), said("it is 7")) == Score(value=1.0, answer="7")
    assert await cluster.score(asked("style"), said("four")) == Score(value=4.0)
    assert await cluster.score(asked("poems"), said("bad")) == Score(value=-1.0)

    verdicts = await asyncio.gather(
        cluster.score(asked("style"), said("die")),
        cluster.score(asked("hasty"), said("hang")),
        cluster.score(asked("style"), said("abc")),
        cluster.score(asked("poems"), said("unknown")),
        cluster.score(asked("math"), said("7")),
        return_exceptions=True,
    )
    reasons = [type(verdict).__name__ if isinstance(verdict, Exception) else verdict for verdict in verdicts]
    assert reasons == ["RewardError", "RewardError", Score(value=3.0), "RewardRaised", "RewardError"]
    assert "died" in str(verdicts[0])
    assert "longer than 1 s" in str(verdicts[1])
    assert "KeyError: 'unknown'" in str(verdicts[3])
    assert "no reference answer" in str(verdicts[4])

    stats = cluster.stats().values_by_name()
    assert (stats["judging/style/scored"], stats["judging/style/failed"]) == (2, 1)
    assert (stats["judging/hasty/scored"], stats["judging/hasty/failed"]) == (0, 1)
    assert (stats["judging/poems/scored"], stats["judging/poems/failed"]) == (1, 1)
    assert (stats["judging/math/scored"], stats["judging/math/failed"]) == (1, 1)
    assert 0 < stats["judging/style/latency_s"] <= stats["judging/style/latency_max_s"]
    assert stats["judging/hasty/latency_max_s"] >= 1.0
    assert not cluster.stats()


async def test_every_reward_that_cannot_be_imported_is_reported_before_any_work(
    runtime: Runtime, folder: Path, start: Start
) -> None:
    configs = rewards(
        a={"kind": "import", "path": "no_such_module:f"},
        b={"kind": "import", "path": "my_judges:no_such_function"},
        c={"kind": "import", "path": "my_judges:length"},
    )
    with pytest.raises(ConfigError) as caught:
        await start(runtime, configs, config_folder=folder, workers=RewardWorkersConfig(num_processes=1))
    assert [violation.path for violation in caught.value.violations] == ["rewards.a.path", "rewards.b.path"]
    assert "No module named 'no_such_module'" in str(caught.value)


async def test_one_stack_may_hold_rewards_that_run_in_different_places(runtime: Runtime, folder: Path, start: Start) -> None:
    parts = {
        "here": {"kind": "substring"},
        "process": {"kind": "numeric", "pattern": r"return (\d+)"},
        "mine": {"kind": "import", "path": "my_judges:length", "weight": 0.01},
        "sandbox": {"kind": "code", "weight": 2.0},
        "ladder": {"kind": "cascade", "steps": [{"kind": "exact"}, {"kind": "import", "path": "my_judges:length"}]},
    }
    cluster = await start(
        runtime,
        rewards(code={"kind": "stack", "parts": parts}),
        config_folder=folder,
        workers=RewardWorkersConfig(num_processes=1),
    )
    try:
        tests = {"function": "f", "calls": [{"args": [], "returns": 7}]}
        prompt = Prompt(id="code/0", messages=(), domain="code", answer="7", extra={"tests": tests})
        text = "def f(): return 7"
        score = await cluster.score(prompt, said(text))
    finally:
        await cluster.close()
        await cluster.close()
    expected = {"here": 1.0, "process": 1.0, "mine": len(text), "sandbox": 1.0, "ladder": len(text), "ladder.decided_by": 1.0}
    assert expected.items() <= score.named.items()
    assert score.parts.keys() == score.weights.keys() == parts.keys()
    assert score.value == pytest.approx(1 + 1 + 0.01 * len(text) + 2 + len(text))


async def test_a_slow_domain_does_not_delay_another(runtime: Runtime, folder: Path, start: Start) -> None:
    configs = rewards(
        slow={"kind": "import", "path": "my_judges:gated", "timeout_s": 300.0},
        quick={"kind": "stack", "parts": {"style": {"kind": "import", "path": "my_judges:length"}}},
    )
    cluster = await start(runtime, configs, config_folder=folder, workers=RewardWorkersConfig(num_workers=2, num_processes=1))
    await asyncio.gather(*(cluster.score(asked("quick"), said("warm up")) for _ in range(4)))
    slow = [asyncio.create_task(cluster.score(asked("slow", str(folder)), said("x"))) for _ in range(12)]
    await begun(folder)
    for _ in range(3):
        assert (await asyncio.wait_for(cluster.score(asked("quick"), said("four")), 60)).value == 4.0
    assert not any(task.done() for task in slow)
    assert cluster.stats().values_by_name()["judging/quick/scored"] == 7
    (folder / "open").touch()
    assert len(await asyncio.gather(*slow)) == 12


async def test_quick_samples_that_wait_are_judged_together_and_each_gets_its_own_verdict(
    runtime: Runtime, folder: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    sizes: list[int] = []
    ask = RewardWorkers._ask

    async def counted(self: RewardWorkers, rank: int, name: str, cases: Sequence[Case]) -> list[Score | RewardError]:
        sizes.append(len(cases))
        hangs = any(trajectory.text == "hang" for _, trajectory in cases)
        self._rewards = {name: self._rewards[name].model_copy(update={"timeout_s": 2.0 if hangs else 120.0})}
        return await ask(self, rank, name, cases)  # It reads the limit before it waits.

    monkeypatch.setattr(RewardWorkers, "_ask", counted)
    monkeypatch.setattr("reroll.rewards.workers.TOGETHER_S", 60.0)  # However slow the machine is, they count as quick.
    style: dict[str, object] = {"kind": "import", "path": "my_judges:length"}
    cluster = await start(runtime, rewards(style=style), config_folder=folder, workers=RewardWorkersConfig(num_processes=2))
    texts = ["a" * length for length in range(1, 120)]
    texts[20], texts[40] = "die", "hang"
    verdicts = await asyncio.gather(*(cluster.score(asked("style"), said(text)) for text in texts), return_exceptions=True)
    for text, verdict in zip(texts, verdicts, strict=True):
        assert isinstance(verdict, RewardError) if text in ("die", "hang") else verdict == Score(value=len(text))
    assert max(sizes) > 1
    assert len(sizes) < len(texts)


@pytest.mark.parametrize("text", ["die", "hang", "fork"])
async def test_what_a_reward_has_started_ends_with_its_process(runtime: Runtime, folder: Path, start: Start, text: str) -> None:
    timeout_s = 5.0 if text == "hang" else 300.0
    parent: dict[str, object] = {"kind": "import", "path": "my_judges:parent", "timeout_s": timeout_s}
    one = RewardWorkersConfig(num_processes=1)
    cluster = await start(runtime, rewards(style=parent), config_folder=folder, workers=one)
    judged = cluster.score(asked("style", str(folder / "pids")), said(text))
    if text == "fork":
        assert (await judged).value == 1.0
        await cluster.close()
    else:
        with pytest.raises(RewardError, match="died" if text == "die" else "longer than 5 s"):
            await judged
    pids = [int(line) for line in (folder / "pids").read_text().split()]
    while any(is_there(pid) for pid in pids):
        await asyncio.sleep(0.05)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_samples_behind_a_slow_one_go_to_whoever_is_free(folder: Path, start: Start) -> None:
    async with make_runtime(LocalRuntimeConfig()) as runtime:
        reward: dict[str, object] = {"kind": "import", "path": "my_judges:gated", "timeout_s": 300.0}
        cluster = await start(
            runtime, rewards(style=reward), config_folder=folder, workers=RewardWorkersConfig(num_processes=2)
        )
        for _ in range(50):  # It is known as quick.
            await cluster.score(asked("style"), said(""))
        calls = [(str(folder), "nap"), *[(None, "")] * 40]
        slow, *quick = (asyncio.create_task(cluster.score(asked("style", where), said(text))) for where, text in calls)
        await asyncio.wait_for(asyncio.gather(*quick[20:]), 60)
        assert not slow.done()
        (folder / "open").touch()
        await asyncio.gather(slow, *quick)
        await cluster.close()


async def test_who_gives_up_while_waiting_is_not_judged(folder: Path, start: Start) -> None:
    async with make_runtime(LocalRuntimeConfig()) as runtime:
        reward: dict[str, object] = {"kind": "import", "path": "my_judges:noted"}
        cluster = await start(
            runtime, rewards(style=reward), config_folder=folder, workers=RewardWorkersConfig(num_processes=1)
        )
        calls = [asyncio.create_task(cluster.score(asked("style", str(folder)), said(text))) for text in ("a", "b", "c")]
        await asyncio.sleep(0)
        calls[1].cancel()
        await asyncio.wait(calls)
        assert calls[1].cancelled()
        assert (folder / "noted").read_text() == "ac"


async def test_a_sample_whose_judge_was_killed_before_it_could_judge_is_judged_by_another(folder: Path, start: Start) -> None:
    async with make_runtime(LocalRuntimeConfig()) as runtime:
        configs = rewards(style={"kind": "import", "path": "my_judges:whose"})
        cluster = await start(runtime, configs, config_folder=folder, workers=RewardWorkersConfig(num_processes=1))
        pid = int((await cluster.score(asked("style"), said("x"))).value)
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # Its parent's watcher may have buried it already.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert (await cluster.score(asked("style"), said("x"))).value != pid
        told = cluster.stats().values_by_name()
        assert (told["judging/style/scored"], told["judging/style/failed"]) == (2, 0)


async def test_a_call_that_nobody_waits_for_holds_its_process_until_it_ends(folder: Path, start: Start) -> None:
    async with make_runtime(LocalRuntimeConfig()) as runtime:
        configs = rewards(slow={"kind": "import", "path": "my_judges:gated", "timeout_s": 300.0})
        cluster = await start(runtime, configs, config_folder=folder, workers=RewardWorkersConfig(num_processes=1))
        given_up = asyncio.create_task(cluster.score(asked("slow", str(folder)), said("x")))
        await begun(folder)
        given_up.cancel()
        cluster.stats()
        patient = asyncio.create_task(cluster.score(asked("slow", str(folder)), said("x")))
        await asyncio.sleep(0)  # From now on it waits.
        begun_s = time.monotonic()
        await asyncio.sleep(0.2)
        held_s = time.monotonic() - begun_s
        assert not patient.done()
        (folder / "open").touch()
        await patient
        assert cluster.stats().values_by_name()["judging/slow/wait_s"] >= held_s


async def test_a_domain_without_reward_and_without_default_fails_with_the_fix(start: Start) -> None:
    async with make_runtime(LocalRuntimeConfig()) as runtime:
        cluster = await start(runtime, rewards(math={"kind": "exact"}))
        with pytest.raises(RewardError, match=r"no reward judges domain poems: add rewards.poems or rewards.default"):
            await cluster.score(asked("poems"), said(""))


async def test_the_working_directory_is_importable(folder: Path, monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    monkeypatch.chdir(folder)
    async with make_runtime(LocalRuntimeConfig()) as runtime:
        cluster = await start(
            runtime,
            {"default": ImportRewardConfig(kind="import", path="my_judges:length")},
            workers=RewardWorkersConfig(num_processes=1),
        )
        assert (await cluster.score(asked("any"), said("abc"))).value == 3.0


async def test_trivial_rewards_run_at_hundreds_a_second(folder: Path, start: Start) -> None:
    async with make_runtime(LocalRuntimeConfig()) as runtime:
        configs = {"default": ImportRewardConfig(kind="import", path="my_judges:length")}
        cluster = await start(runtime, configs, config_folder=folder, workers=RewardWorkersConfig(num_processes=1))
        start_s = time.process_time()
        scores = await asyncio.gather(*(cluster.score(asked("any"), said("abc")) for _ in range(400)))
        # Processor time of this side: the wall clock of a busy machine says nothing.
        cpu_s = time.process_time() - start_s
    assert {score.value for score in scores} == {3.0}
    assert 400 / cpu_s > 200
