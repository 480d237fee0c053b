"""Environments behave alike wherever they run, and misbehave without harm to anything but their own episode."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import env_faults
import pytest
import ray
from pydantic import TypeAdapter

from reroll.config.envs import EnvConfig, EnvWorkersConfig
from reroll.config.parts import LocalRuntimeConfig
from reroll.envs.base import AsyncEnv, InvalidAction, StepResult
from reroll.envs.cluster import EnvCluster
from reroll.errors import ConfigError, EnvError, EnvLost
from reroll.runtime import make_runtime
from reroll.runtime.processes import ProcessWorkers
from reroll_zoo.games.frozen_lake import FrozenLake, FrozenLakeConfig
from reroll_zoo.ray.config import RayRuntimeConfig

ALL = ["inline", "threads", "processes", "ray"]
HERE = ["inline", "threads", "processes"]
"""For what the controller does alike for all: an actor takes a second to start."""
TIMED = ["threads", "processes", "ray"]
APART = ["processes", "ray"]
HANG_S = 2.0
"""Long enough for a busy machine to answer in, short enough to wait for."""


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    ray.init("local", num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("one_ray")
    return str(request.param)


def on(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", kinds, indirect=True)


def puppet(name: str = "Puppet", **options: Any) -> dict[str, Any]:
    return {"kind": "import", "path": f"env_faults:{name}", "options": options}


@asynccontextmanager
async def cluster_of(kind: str, envs: dict[str, dict[str, Any]], **settings: Any) -> AsyncIterator[EnvCluster]:
    """A cluster with one worker. Whatever a test does with it, nothing is left when it is closed."""
    nodes = TypeAdapter(dict[str, EnvConfig]).validate_python(envs)
    one = {"num_workers": 1} if kind in APART else {}
    config = TypeAdapter(EnvWorkersConfig).validate_python({"kind": kind, **one, **settings})
    async with make_runtime(RayRuntimeConfig(kind="ray") if kind == "ray" else LocalRuntimeConfig()) as runtime:
        cluster = await EnvCluster.start(runtime, config, nodes)
        try:
            yield cluster
        finally:
            env_faults.RELEASE.set()
            await cluster.close()
            await cluster.close()
            env_faults.RELEASE.clear()
    assert cluster.stats().values_by_name()["env/live"] == 0
    await until(lambda: not [thread.name for thread in threading.enumerate() if thread.name.startswith("env")])


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not is_so():
            await asyncio.sleep(0.01)


def is_running(pid: float) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # It may end while it is looked at.
        return False


async def opened(cluster: EnvCluster, domain: str, seed: int = 0) -> AsyncEnv:
    env = cluster.live(domain, seed)
    await env.reset()
    return env


async def failure_of(env: AsyncEnv, action: str | None) -> str:
    """The reason that an episode of this one action fails for."""

    async def play() -> None:
        await env.reset()
        if action is not None:
            await env.step(action)

    with pytest.raises(EnvError) as caught:
        await play()
    await env.close()
    return str(caught.value)


async def assert_plays(cluster: EnvCluster, domain: str = "puppet") -> None:
    env = await opened(cluster, domain)
    assert (await env.step("go")).messages[0]["content"] == "0: 1"
    await env.close()


@on(*ALL)
async def test_an_episode_is_the_same_wherever_it_is_played(kind: str) -> None:
    async with cluster_of(kind, {"lake": {"kind": "frozen_lake", "size": 5, "slippery": True}}, max_live=3) as cluster:

        async def play(seed: int) -> list[object]:
            env = cluster.live("lake", seed)
            seen: list[object] = [await env.reset()]
            with pytest.raises(InvalidAction, match="'Sideways' is no action here"):
                await env.step("Sideways")
            for turn in range(100):
                outcome = await env.step(("Up", "Right", "Down", "Left")[(turn + seed) % 4])
                seen.append(outcome)
                if outcome.terminated or outcome.truncated:
                    break
            await env.close()
            await env.close()
            return seen

        def play_directly(seed: int) -> list[object]:
            env = FrozenLake(FrozenLakeConfig(size=5, slippery=True))
            seen: list[object] = [env.reset(seed)]
            while not isinstance(seen[-1], StepResult) or not (seen[-1].terminated or seen[-1].truncated):
                seen.append(env.step(("Up", "Right", "Down", "Left")[(len(seen) - 1 + seed) % 4]))
            return seen

        assert await asyncio.gather(*(play(seed) for seed in range(8))) == [play_directly(seed) for seed in range(8)]


@on(*ALL)
async def test_an_async_environment_is_awaited(kind: str) -> None:
    async with cluster_of(kind, {"later": puppet("Later")}) as cluster:
        envs = await asyncio.gather(*(opened(cluster, "later", seed) for seed in range(3)))
        assert [(await env.step("go")).messages[0]["content"] for env in envs] == ["0: 1", "1: 1", "2: 1"]
        with pytest.raises(InvalidAction, match="say go or end"):
            await envs[0].step("nonsense")
        assert await failure_of(cluster.live("later", 0), "raise")
        assert "SystemExit: leaving" in await failure_of(cluster.live("later", 0), "exit")
        assert (await envs[1].step("end")).info == {"success": 1.0}
        await asyncio.gather(*(env.close() for env in envs))


BAD_STEPS = {
    "raise": r"Puppet\.step raised LookupError: the key is lost \(.*env_faults\.py:\d+\)",
    "exit": r"Puppet\.step raised SystemExit: leaving",
    "none": r"Puppet\.step: returned a NoneType: return a StepResult",
    "nan": r"Puppet\.step: gave the reward nan",
    "infinite info": r"gave the info size inf",
    "word for reward": r"gave a reward that is a str",
    "word for flag": r"gave terminated 'yes'",
    "silence": r"gave no message and did not end the episode",
    "bare text": r"gave a str for its messages",
    "no role": r"gave \{'content': 'hello'\} as a message",
    "number for content": r"content is a int",
    "object in message": r"not plain data",
    "long state": r"state of 1,000,000 characters",
}
BAD_OPENINGS = {
    "init raise": r"Puppet\.__init__ raised LookupError",
    "init exit": r"Puppet\.__init__ raised SystemExit",
    "reset raise": r"Puppet\.reset raised LookupError",
    "reset nonsense": r"Puppet\.reset raised .*InvalidAction: say go or end",
    "reset nothing": r"Puppet\.reset: gave no message",
    "reset none": r"Puppet\.reset: gave a NoneType for its messages",
}


@on(*ALL)
async def test_what_an_environment_does_wrong_fails_its_own_episode_alone(kind: str, tmp_path: Path) -> None:
    diary = tmp_path / "closed"
    envs = {fault: puppet(fault=fault) for fault in BAD_OPENINGS}
    async with cluster_of(kind, {**envs, "puppet": puppet(diary=str(diary))}, max_live=2) as cluster:
        bystander = await opened(cluster, "puppet", 99)
        for fault, reason in BAD_OPENINGS.items():
            assert re.search(reason, await failure_of(cluster.live(fault, 0), None))
        for seed, (action, reason) in enumerate(BAD_STEPS.items()):
            assert re.search(reason, await failure_of(cluster.live("puppet", seed), action))
        stats = cluster.stats().values_by_name()
        assert (await bystander.step("go")).messages[0]["content"] == "99: 1"
        await bystander.close()
    assert stats["env/puppet/failures"] == len(BAD_STEPS)
    assert stats["env/init raise/failures"] == 1
    assert diary.read_text().split() == [*map(str, range(len(BAD_STEPS))), "99"]  # Failed or not, all were closed.


@on(*HERE)
async def test_a_step_can_be_asked_again_after_a_failed_one(kind: str) -> None:
    async with cluster_of(kind, {"puppet": puppet()}) as cluster:
        env = await opened(cluster, "puppet")
        with pytest.raises(EnvError):
            await env.step("raise")
        assert (await env.step("go")).state == "1"
        await env.close()
        with pytest.raises(EnvError, match="not open"):
            await env.step("go")
        with pytest.raises(EnvError, match="for one episode"):
            await env.reset()


@on(*HERE)
async def test_a_long_message_is_cut_with_a_note(kind: str) -> None:
    async with cluster_of(kind, {"puppet": puppet()}, max_message_chars=10) as cluster:
        env = await opened(cluster, "puppet")
        outcome = await env.step("megabytes")
        assert outcome.messages == ({"role": "user", "content": "ababababab\n[cut: 4,000,000 characters in all]"},)
        assert (type(outcome.reward), outcome.reward) == (float, 1.0)
        with pytest.raises(InvalidAction, match=r"no! no! no\n\[cut: 4,000 characters in all\]"):
            await env.step("scold")
        with pytest.raises(EnvError) as caught:
            await env.step("wail")
        assert len(str(caught.value)) < 2100
        await env.close()


@on(*HERE)
async def test_a_failing_close_is_reported_and_frees_its_place(kind: str) -> None:
    async with cluster_of(kind, {"puppet": puppet()}, max_live=1) as cluster:
        env = await opened(cluster, "puppet")
        await env.step("closing raise")
        with pytest.raises(EnvError, match=r"close raised LookupError"):
            await env.close()
        await assert_plays(cluster)


@on(*HERE)
async def test_no_more_live_at_once_than_allowed_and_turns_come_in_order(kind: str) -> None:
    async with cluster_of(kind, {"puppet": puppet()}, max_live=2) as cluster:
        first, second = [await opened(cluster, "puppet", seed) for seed in range(2)]
        order: list[int] = []

        async def episode(seed: int) -> None:
            env = await opened(cluster, "puppet", seed)
            order.append(seed)
            await env.close()

        async with asyncio.TaskGroup() as group:
            for seed in range(6):
                group.create_task(episode(seed))
            await asyncio.sleep(0.05)
            assert cluster.stats().values_by_name()["env/live"] == 2
            assert order == []
            await first.close()
        assert order == [0, 1, 2, 3, 4, 5]
        await second.close()


@on(*ALL)
async def test_closing_the_cluster_closes_what_lives_and_turns_away_who_waits(kind: str, tmp_path: Path) -> None:
    diary = tmp_path / "closed"
    async with cluster_of(kind, {"puppet": puppet(diary=str(diary))}, max_live=1) as cluster:
        env = await opened(cluster, "puppet", 5)
        waiting = asyncio.create_task(cluster.live("puppet", 6).reset())
        await asyncio.sleep(0)
    with pytest.raises(EnvError, match="closing"):
        await waiting
    assert diary.read_text() == "5\n"
    with pytest.raises(EnvError):
        await env.step("go")
    await env.close()


@on(*HERE)
async def test_an_episode_that_gives_up_waiting_leaves_its_turn_to_others(kind: str) -> None:
    async with cluster_of(kind, {"puppet": puppet()}, max_live=1) as cluster:
        env = await opened(cluster, "puppet")
        unwanted = cluster.live("puppet", 1)
        waiting = asyncio.create_task(unwanted.reset())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        await unwanted.close()
        await env.close()
        await assert_plays(cluster)


@on(*ALL)
async def test_every_environment_that_cannot_be_imported_is_reported_at_the_start(kind: str) -> None:
    envs = {
        "a": {"kind": "import", "path": "no_such_module:Env"},
        "b": puppet("NoSuchClass"),
        "c": puppet("NOT_A_CLASS"),
        "d": puppet(colour="red"),
        "e": puppet(),
    }
    with pytest.raises(ConfigError) as caught:
        async with cluster_of(kind, envs):
            pass
    assert [violation.path for violation in caught.value.violations] == [f"envs.{domain}.env.path" for domain in "abcd"]
    for words in ("No module named 'no_such_module'", "NoSuchClass", "is a int", "unexpected keyword argument 'colour'"):
        assert words in str(caught.value)


@on(*HERE)
async def test_stats_tell_what_happened_since_the_last_time(kind: str) -> None:
    async with cluster_of(kind, {"puppet": puppet(), "idle": puppet()}, max_live=1) as cluster:
        env = await opened(cluster, "puppet")
        await env.step("go")
        await env.step("wait 0.05")
        with pytest.raises(InvalidAction):
            await env.step("nonsense")
        stats = cluster.stats()
        values = stats.values_by_name()
        await env.close()
        again = cluster.stats().values_by_name()
    assert set(values) == {"env/live", "env/waiting_s", *(f"env/puppet/{name}" for name in PER_DOMAIN)}
    assert values["env/live"] == 1
    assert values["env/puppet/failures"] == 0  # The policy's mistakes are not the environment's.
    assert 0.05 / 3 < values["env/puppet/step_s"] < values["env/puppet/step_max_s"]
    assert values["env/puppet/step_max_s"] >= 0.05
    assert values["env/puppet/reset_s"] > 0
    assert again == {"env/live": 0}


PER_DOMAIN = ("reset_s", "step_s", "step_max_s", "failures")


@on(*TIMED)
async def test_a_hang_fails_its_episode_and_neither_its_neighbours_nor_the_next(kind: str) -> None:
    envs = {"puppet": puppet(), "stuck": puppet(fault="reset hang"), "later": puppet("Later")}
    async with cluster_of(kind, envs, timeout_s=HANG_S, max_live=5) as cluster:
        neighbour = await opened(cluster, "puppet", 3)
        closing = await opened(cluster, "puppet")
        await closing.step("closing hang")
        before = (await neighbour.step("where")).info["pid"]
        reasons = await asyncio.gather(
            failure_of(cluster.live("puppet", 0), "hang"),
            failure_of(cluster.live("stuck", 0), None),
            failure_of(cluster.live("later", 0), "sleep"),
            failure_to_close(closing),
        )
        assert reasons == [
            f"env_faults:{what} took longer than {HANG_S:g} s"
            for what in ("Puppet.step", "Puppet.reset", "Later.step", "Puppet.close")
        ]
        assert (await neighbour.step("go")).messages[0]["content"] == "3: 1"
        newcomer = await opened(cluster, "puppet")
        after = (await newcomer.step("where")).info["pid"]
        values = cluster.stats().values_by_name()
        assert values["env/live"] == 2
        assert values["env/puppet/failures"] == 2
        if kind == "threads":  # A task that is awaited can be cancelled, and its thread then ends; others cannot be ended.
            await until(lambda: cluster.stats().values_by_name()["env/stuck_threads"] == 3)
        else:
            assert after != before
            assert is_running(before)
        await neighbour.close()
        if kind != "threads":  # Nobody needs the process of the hung ones any more.
            await until(lambda: not is_running(before))
        assert (await newcomer.step("go")).state == "1"


async def failure_to_close(env: AsyncEnv) -> str:
    with pytest.raises(EnvError) as caught:
        await env.close()
    return str(caught.value)


@on(*APART)
async def test_a_crash_fails_the_episodes_that_ran_there_and_the_next_runs_normally(kind: str) -> None:
    async with cluster_of(kind, {"puppet": puppet(), "doomed": puppet(fault="reset die")}, max_live=2) as cluster:
        neighbour = await opened(cluster, "puppet")
        before = (await neighbour.step("where")).info["pid"]
        child = (await neighbour.step("child")).info["pid"]
        reason = await failure_of(cluster.live("puppet", 1), "die")
        how = "exit code 7" if kind == "processes" else "killed, out of memory, crashed, or its node was lost"
        assert reason == f"the process of the environment died ({how})"
        with pytest.raises(EnvError, match="died"):
            await neighbour.step("go")
        await neighbour.close()
        if kind == "processes":  # What the environment had started is gone as well.
            await until(lambda: not is_running(child))
        else:
            os.kill(int(child), 9)
        await assert_plays(cluster)
        assert "died" in await failure_of(cluster.live("doomed", 0), None)
        env = await opened(cluster, "puppet")
        assert (await env.step("where")).info["pid"] not in (before, os.getpid())
        assert cluster.stats().values_by_name()["env/live"] == 1


@on(*TIMED)
async def test_a_cancelled_episode_does_not_wait_for_its_environment(kind: str, tmp_path: Path) -> None:
    diary = tmp_path / "closed"
    async with cluster_of(kind, {"puppet": puppet(diary=str(diary))}, max_live=1) as cluster:
        env = await opened(cluster, "puppet", 8)
        gate = tmp_path / "gate"
        stepping = asyncio.create_task(env.step(f"until {gate}"))
        await until(Path(f"{gate}.begun").exists)
        stepping.cancel()
        await asyncio.wait({stepping})
        await env.close()
        assert not diary.exists()  # It is still stepping.
        gate.touch()
        await assert_plays(cluster)  # Its place is free once it is closed.
        assert diary.read_text().startswith("8\n")


@on("threads", "processes")
async def test_an_environment_is_called_from_one_thread_only(kind: str) -> None:
    async with cluster_of(kind, {"puppet": puppet()}) as cluster:
        envs = [await opened(cluster, "puppet", seed) for seed in range(3)]
        outcomes = [await env.step("where") for _ in range(3) for env in envs]
        threads = [outcome.info["thread"] for outcome in outcomes]
        assert threads == threads[:3] * 3
        assert len(set(threads)) == 3


@on("threads", "processes")
async def test_a_run_that_is_busy_itself_blames_no_environment(kind: str) -> None:
    async with cluster_of(kind, {"puppet": puppet()}, timeout_s=HANG_S) as cluster:
        env = await opened(cluster, "puppet")
        stepping = asyncio.create_task(env.step("go"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(HANG_S + 0.1)  # The answer comes in the meantime, and nobody looks.
        assert (await stepping).state == "1"


async def test_steps_of_one_moment_travel_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster_of("processes", {"puppet": puppet()}) as cluster:
        envs = [await opened(cluster, "puppet", seed) for seed in range(16)]
        sent: list[Any] = []
        one = ProcessWorkers.one
        monkeypatch.setattr(ProcessWorkers, "one", lambda *args: sent.append(args[-1]) or one(*args))
        await asyncio.gather(*(env.step("go") for env in envs))
        assert [len(commands) for commands in sent if commands] == [16]


async def test_a_process_that_dies_while_no_call_waits_is_noticed_and_replaced() -> None:
    async with cluster_of("processes", {"puppet": puppet()}) as cluster:
        env = await opened(cluster, "puppet")
        os.kill(int((await env.step("where")).info["pid"]), 9)
        await until(lambda: cluster.stats().values_by_name()["env/live"] == 0)
        with pytest.raises(EnvLost, match=r"the process of the environment died \(SIGKILL\)"):
            await env.step("go")
        await assert_plays(cluster)


async def test_several_processes_share_the_environments_evenly() -> None:
    async with cluster_of("processes", {"puppet": puppet()}, num_workers=2) as cluster:
        envs = await asyncio.gather(*(opened(cluster, "puppet", seed) for seed in range(6)))
        pids = [(await env.step("where")).info["pid"] for env in envs]
    assert sorted(pids.count(pid) for pid in set(pids)) == [3, 3]
    await until(lambda: not any(map(is_running, pids)))


async def test_a_worker_that_dies_while_it_imports_is_reported_at_the_start(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "deadly_module.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"died \(exit code 3\)"):
        async with cluster_of("processes", {"a": {"kind": "import", "path": "deadly_module:Env"}}):
            pass


@on(*APART)
async def test_an_import_that_does_not_end_is_reported_at_the_start(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("reroll.envs.cluster.START_TIMEOUT_S", 0.5)
    (tmp_path / "endless_module.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"importing the environments took longer than 0\.5 s"):
        async with cluster_of(kind, {"a": {"kind": "import", "path": "endless_module:Env"}}):
            pass


async def test_a_thread_that_hangs_is_counted_until_its_call_returns() -> None:
    async with cluster_of("threads", {"puppet": puppet()}, timeout_s=HANG_S) as envs:
        assert await failure_of(envs.live("puppet", 0), "hang") == f"env_faults:Puppet.step took longer than {HANG_S:g} s"
        await until(lambda: envs.stats().values_by_name().get("env/stuck_threads") == 1)
        await assert_plays(envs)
        env_faults.RELEASE.set()
        await until(lambda: "env/stuck_threads" not in envs.stats().values_by_name())


async def test_ray_workers_need_the_ray_runtime() -> None:
    config = TypeAdapter(EnvWorkersConfig).validate_python({"kind": "ray"})
    async with make_runtime(LocalRuntimeConfig()) as runtime:
        with pytest.raises(ConfigError, match=r"set runtime\.kind to ray"):
            await EnvCluster.start(runtime, config, {})


async def test_a_domain_without_environment_is_refused_with_the_fix() -> None:
    async with cluster_of("inline", {}) as cluster:
        with pytest.raises(ValueError, match=r"add envs\.maze"):
            cluster.live("maze", 0)
