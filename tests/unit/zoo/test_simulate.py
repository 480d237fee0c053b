"""The simulator: the production scheduler on a virtual clock."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reroll.config.parts import RolloutConfig
from reroll.errors import ConfigError, RerollError
from reroll.observe.journal import STEPPED, TAKEN, Event, Journal, SampleState, read_journal
from reroll.rollout.scheduler import RolloutScheduler
from reroll.types import Completion, FinishReason, Group, Prompt, Score, Status, Trajectory, Turn
from reroll_zoo.audit.audit import audit
from reroll_zoo.simulate import compare
from reroll_zoo.simulate.clock import NothingLeft, VirtualLoop, run_virtually
from reroll_zoo.simulate.compare import Compared
from reroll_zoo.simulate.cores import Cores
from reroll_zoo.simulate.engines import EngineModel
from reroll_zoo.simulate.recorded import sharing_of
from reroll_zoo.simulate.report import page_of
from reroll_zoo.simulate.run import Prediction, Simulation, System, _Prompts, simulate
from reroll_zoo.simulate.workload import Drawn, Workload, fixed, parse_drawn


def tail(least: float = 16, most: float = 256) -> Drawn:
    return parse_drawn(f"pareto:{least},1.2", salt=1, name="lengths", most=most)


def system(*, num_engines: int = 2, train_s: float = 0.1, shared: bool = False, **changes: Any) -> System:
    engine = EngineModel(decode_s=lambda num: 0.001 + 0.00001 * num, max_running=16, report_every=8, move_s=0.01, load_s=0.02)
    seats = tuple((str(rank),) for rank in range(num_engines))
    return System(
        engine=engine, engine_seats=seats, policy_seats=(("0" if shared else "9",),), train_s=train_s, num_devices=4, **changes
    )


def workload(**changes: Any) -> Workload:
    return Workload(**{"lengths": tail(), "prompt_tokens": 32, "max_tokens": 256, **changes})


def test_time_jumps_to_the_next_timer_and_never_runs_backwards() -> None:
    async def main() -> list[float]:
        loop, seen = asyncio.get_running_loop(), []
        assert isinstance(loop, VirtualLoop)

        async def wake(after_s: float) -> None:
            await asyncio.sleep(after_s)
            seen.append(loop.time())

        await asyncio.gather(*(wake(after_s) for after_s in (3600.0, 0.5, 0.0, 86400.0 * 3)))
        return seen

    assert run_virtually(main()) == pytest.approx([0.0, 0.5, 3600.0, 86400.0 * 3])


def test_a_charged_clock_moves_on_by_the_time_that_this_thread_worked_but_for_what_is_exempt() -> None:
    async def main() -> tuple[float, float]:
        loop, began_s = asyncio.get_running_loop(), time.thread_time()
        assert isinstance(loop, VirtualLoop)
        while time.thread_time() - began_s < 0.02:
            pass
        await asyncio.sleep(0)
        at_s = loop.time()
        worked_s = time.thread_time() - began_s
        loop.exempt(worked_s)
        await asyncio.sleep(0)
        return at_s, loop.time()

    at_s, later_s = run_virtually(main(), is_charged=True)
    assert at_s >= 0.02
    assert later_s == at_s
    assert run_virtually(main()) == (0.0, 0.0)


def test_waiting_for_what_never_comes_is_told_instead_of_hanging() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingLeft):
        run_virtually(main())


def test_cores_shared_by_two_take_as_long_as_one_after_the_other() -> None:
    async def main() -> list[float]:
        cores, loop, ended = Cores(), asyncio.get_running_loop(), []

        async def work(seconds: float) -> None:
            await cores.work(seconds)
            ended.append(loop.time())

        await asyncio.gather(work(1.0), work(3.0))
        return ended

    assert run_virtually(main()) == pytest.approx([2.0, 4.0])


def test_cores_of_which_there_are_enough_slow_nobody() -> None:
    async def main() -> float:
        cores = Cores(0.0)
        await asyncio.gather(cores.work(1.0), cores.work(3.0))
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(3.0)


def test_an_engine_takes_its_lengths_times_the_time_of_a_step(tmp_path: Path) -> None:
    engine = EngineModel(decode_s=lambda num: 0.01 * num, max_running=4)
    alone = System(engine=engine, engine_seats=(("0",),), policy_seats=(("1",),), train_s=0.5)
    rollout = RolloutConfig(prompts_per_step=2, group_size=4)

    outcome = simulate(rollout, workload(lengths=fixed(100)), alone, num_steps=3, folder=tmp_path)

    # Eight samples, four at a time: two rounds of 100 steps at 0.04 s.
    assert outcome.step_s == pytest.approx(8.0 + 0.5)
    assert outcome.bound == "engines"
    assert outcome.idle["trainer"] == pytest.approx(1 - 0.5 / 8.5)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    max_staleness=st.integers(0, 3),
    take_window=st.integers(1, 3),
    oversample=st.sampled_from([1.0, 1.5]),
    long_rounds=st.booleans(),
    extra_samples=st.integers(0, 1),
    shared=st.booleans(),
    lost=st.booleans(),
    failed=st.sampled_from([0.0, 0.1]),
)
def test_nothing_is_lost_or_too_stale_whatever_the_setting(
    tmp_path_factory: pytest.TempPathFactory,
    max_staleness: int,
    take_window: int,
    oversample: float,
    long_rounds: bool,
    extra_samples: int,
    shared: bool,
    lost: bool,
    failed: float,
) -> None:
    folder = tmp_path_factory.mktemp("simulated")
    rollout = RolloutConfig(
        prompts_per_step=4,
        group_size=3,
        max_staleness=max_staleness,
        take_window=take_window,
        oversample=oversample,
        long_rounds=long_rounds and not max_staleness,
        extra_samples=extra_samples,
    )
    machines = system(shared=shared, losses=((0.3, (1,)),) if lost else ())

    async def main() -> Simulation:
        simulation = Simulation(rollout, workload(failed=failed), machines, folder)
        await simulation.run(6)
        assert simulation.devices._active == []
        assert not simulation.devices._queue
        return simulation

    outcome = run_virtually(main()).outcome
    found = audit(folder / "journal", max_staleness=max_staleness, defers=rollout.long_rounds)
    times = [event.time_s for event in read_journal(folder / "journal")]

    assert found.violations == []
    assert found.trained == 24
    assert times == sorted(times)
    assert max(outcome.staleness) <= max_staleness
    assert outcome.trained_tokens + outcome.wasted_tokens <= outcome.written_tokens + outcome.num_samples


def test_a_controller_that_is_slow_bounds_the_rate_however_many_engines_there_are(tmp_path: Path) -> None:
    rollout = RolloutConfig(prompts_per_step=16, group_size=4)
    times = {}
    for turn_s in (0.0, 0.05):
        slow = system(num_engines=8, train_s=0.0, turn_s=turn_s)
        times[turn_s] = simulate(rollout, workload(), slow, num_steps=3, folder=tmp_path / str(turn_s)).wall_s
    assert times[0.05] >= 3 * 64 * 0.05 > times[0.0]


def test_what_the_models_take_of_the_core_is_not_the_controllers(tmp_path: Path) -> None:
    outcome = simulate(RolloutConfig(prompts_per_step=8, group_size=4), workload(), system(), num_steps=4, folder=tmp_path)
    assert outcome.models_s > 0
    assert outcome.controller_s > 0


def tokens_per_s(outcome: Prediction) -> float:
    return outcome.mean("tokens") / outcome.step_s


def test_long_rounds_are_faster_than_over_sampling_and_than_waiting_for_all(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"oversample": 1.25}, {"oversample": 1.25, "long_rounds": True}]
    speeds = []
    for index, change in enumerate(changes):
        rollout = RolloutConfig(prompts_per_step=16, group_size=2, **change)
        load = workload(lengths=tail(16, 2048), max_tokens=2048)
        speeds.append(tokens_per_s(simulate(rollout, load, system(), num_steps=60, folder=tmp_path / str(index))))

    # Tokens a second, not steps: who trains on short ones first gains nothing by it.
    assert speeds[2] > 1.5 * max(speeds[:2])


def test_scores_of_a_step_in_phases_begin_when_the_last_sample_is_written(tmp_path: Path) -> None:
    rollout = RolloutConfig(prompts_per_step=2, group_size=2)
    lengths = Drawn(np.array([10.0, 200.0]))
    waits = {
        together: simulate(
            rollout,
            workload(lengths=lengths, score_s=fixed(3.0)),
            replace(system(), scores_together=together),
            num_steps=8,
            folder=tmp_path / str(together),
        )
        for together in (False, True)
    }
    assert waits[True].trained_tokens == waits[False].trained_tokens
    for apart, phased in zip(waits[False].steps, waits[True].steps, strict=True):
        assert phased.tokens == apart.tokens
        assert phased.wait_s == pytest.approx(apart.wait_s, abs=0.01), "the longest sample is scored last either way"
    mixed = {
        together: simulate(
            rollout,
            workload(lengths=lengths, score_s=Drawn(np.linspace(0.0, 9.0, 64), 5)),
            replace(system(), scores_together=together),
            num_steps=8,
            folder=tmp_path / f"mixed-{together}",
        ).step_s
        for together in (False, True)
    }
    assert mixed[True] > mixed[False], "a short sample's long score is no longer hidden"


def test_samples_of_a_prompt_are_alike_where_its_factor_is_what_varies() -> None:
    load = workload(lengths=fixed(10), prompt_factors=Drawn(np.array([1.0, 3.0, 100.0]), 1))
    lengths = [{load.num_tokens(seed, prompt) for seed in range(20)} for prompt in range(40)]
    assert all(len(found) == 1 for found in lengths)
    assert set.union(*lengths) == {10, 30, 256}, "cut at what the engine may write"


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    rollout = RolloutConfig(prompts_per_step=4, group_size=3, max_staleness=1)
    runs = [simulate(rollout, workload(), system(), num_steps=5, folder=tmp_path / str(index)) for index in range(2)]

    assert runs[0].wall_s == runs[1].wall_s
    assert runs[0].written_tokens == runs[1].written_tokens


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_streamed_step_trains_on_the_same_and_waits_less(tmp_path: Path, max_staleness: int) -> None:
    rollout = RolloutConfig(prompts_per_step=8, group_size=4, max_staleness=max_staleness)
    waiting, streamed = (
        simulate(
            rollout,
            workload(),
            system(train_s=0.0, train_token_s=1e-4, streams_from=streams_from),
            num_steps=8,
            folder=tmp_path / str(streams_from),
        )
        for streams_from in (None, 64)
    )
    assert streamed.num_samples == waiting.num_samples
    assert streamed.wall_s < 0.9 * waiting.wall_s
    shared = system(train_s=0.0, train_token_s=1e-4, streams_from=64, shared=True)
    in_turn = simulate(rollout, workload(), shared, num_steps=8, folder=tmp_path / "shared")
    assert in_turn.wall_s > streamed.wall_s, "on one device there is nothing to begin early"


def test_a_lost_engine_costs_time_and_its_samples_go_on_elsewhere(tmp_path: Path) -> None:
    rollout = RolloutConfig(prompts_per_step=8, group_size=4)
    whole = simulate(rollout, workload(), system(), num_steps=6, folder=tmp_path / "whole")
    broken = simulate(rollout, workload(), system(losses=((0.2, (1,)),)), num_steps=6, folder=tmp_path / "broken")

    assert broken.num_samples == whole.num_samples
    assert broken.wall_s > whole.wall_s


def test_the_rate_follows_engines_that_join_in_the_midst_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To that of a run which had as many from the beginning; on a virtual clock, by the router of real runs."""
    monkeypatch.setattr("reroll.infer.cluster.JOIN_PAUSE_S", 0.1)
    rollout = RolloutConfig(prompts_per_step=8, group_size=8, max_staleness=2)
    played: dict[str, Prediction] = {}
    for name, num_engines, joins in (("two", 2, ()), ("joined", 2, ((0.2, 2),)), ("four", 4, ())):
        machines = system(num_engines=num_engines, train_s=0.01, joins=joins)
        machines = replace(machines, engine=replace(machines.engine, restart_s=0.2))
        played[name] = simulate(rollout, workload(lengths=fixed(64)), machines, num_steps=24, folder=tmp_path / name)
    assert not audit(tmp_path / "joined" / "journal", max_staleness=2).violations
    two, joined, four = (sum(step.step_s for step in played[name].steps[-12:]) for name in ("two", "joined", "four"))
    assert joined < 0.8 * two
    assert joined == pytest.approx(four, rel=0.1)
    assert len(played["joined"].engine_busy) == 4
    assert played["joined"].num_samples == played["four"].num_samples


def test_episodes_of_several_turns_wait_for_their_environment(tmp_path: Path) -> None:
    rollout = RolloutConfig(prompts_per_step=2, group_size=2)
    played = workload(lengths=fixed(10), turns=fixed(3), env_s=fixed(1.0), reset_s=fixed(0.5))
    engine = EngineModel(decode_s=lambda num: 0.001, max_running=64)
    machines = replace(system(train_s=0.0), engine=engine)

    free = simulate(rollout, played, machines, num_steps=4, folder=tmp_path / "free")
    narrow = simulate(rollout, replace(played, env_slots=1), machines, num_steps=4, folder=tmp_path / "narrow")

    assert free.step_s == pytest.approx(0.5 + 3 * 1.0 + 3 * 0.01)
    assert narrow.step_s == pytest.approx(4 * free.step_s)


async def _score(prompt: Prompt, trajectory: Trajectory) -> Score:
    return Score(value=float(int(trajectory.id.partition(".")[2]) % 2))


class _Gates:
    """A real scheduler's engine, in which a test lets one sample after the other end."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Event] = {}

    def gate(self, id: str) -> asyncio.Event:
        return self._open.setdefault(id, asyncio.Event())

    async def episode(self, prompt: Prompt, id: str, seed: int) -> Trajectory:
        await self.gate(id).wait()
        completion = Completion(token_ids=(1,), logprobs=(-1.0,), finish_reason=FinishReason.STOP, versions=((0, 1),))
        return Trajectory(id=id, turns=(Turn(prompt_ids=(1,), completion=completion, text=""),), status=Status.COMPLETED)


async def _drive(rollout: RolloutConfig, order: list[Event], folder: Path, num_steps: int) -> None:
    """The real scheduler on a real loop; its samples end, and its steps are over, in the order of these events."""
    gates = _Gates()
    with Journal(folder) as journal:
        scheduler = RolloutScheduler(rollout, _Prompts(), episode=gates.episode, score=_score, journal=journal, seed=0)
        taking: asyncio.Task[list[Group]] = asyncio.create_task(scheduler.take(rollout.prompts_per_step))
        for event in order:
            if event.state is SampleState.SCORING:
                gates.gate(event.sample_id).set()
            elif event.state == STEPPED:
                scheduler.release(await taking, version=event.detail["version"])
                if event.detail["version"] == num_steps:
                    break
                taking = asyncio.create_task(scheduler.take(rollout.prompts_per_step))
            for _ in range(20):
                await asyncio.sleep(0)
        await scheduler.close()


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_the_simulated_scheduler_takes_and_admits_in_the_order_of_the_real_one(tmp_path: Path, max_staleness: int) -> None:
    rollout = RolloutConfig(prompts_per_step=3, group_size=2, max_staleness=max_staleness)
    simulate(rollout, workload(), system(), num_steps=6, folder=tmp_path)
    simulated = list(read_journal(tmp_path / "journal"))

    asyncio.run(_drive(rollout, simulated, tmp_path / "real", 6))
    real = list(read_journal(tmp_path / "real"))

    def decisions(events: list[Event]) -> list[tuple[str, Any]]:
        told = [event for event in events if event.state in (SampleState.QUEUED, SampleState.TRAINED, TAKEN, STEPPED)]
        return [
            (str(event.state), event.detail.get("groups") or event.detail.get("version"), event.sample_id) for event in told
        ]

    assert decisions(simulated) == decisions(real)
    assert len(decisions(real)) > 6 * 3 * 2


@pytest.mark.parametrize("text", ["nonsense:1", "uniform:1", "lognormal:a,b", "fixed:-3"])
def test_a_distribution_that_is_none_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_drawn(text, salt=0, name="--lengths")
    assert "lognormal" in str(refused.value)


def test_distributions_have_the_mean_they_are_asked_for() -> None:
    assert parse_drawn("lognormal:100,0.7", salt=1, name="x").mean == pytest.approx(100, rel=0.05)
    assert parse_drawn("12", salt=1, name="x").of(99) == 12
    assert 63 < parse_drawn("uniform:64,512", salt=1, name="x").of(7) < 513


def test_the_page_shows_every_setting_and_no_markup_of_its_names(tmp_path: Path) -> None:
    rollout = RolloutConfig(prompts_per_step=2, group_size=2, max_staleness=1)
    outcome: Prediction = simulate(rollout, workload(), system(), num_steps=4, folder=tmp_path)
    page = page_of([Compared("<b>one", outcome), Compared("two", outcome)], title="t & u")

    assert "&lt;b&gt;one" in page
    assert "<b>" not in page
    assert "t &amp; u" in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_command_compares_settings_and_finds_the_cheapest(
    tmp_path: Path, rlvr_tree: dict[str, Any], reroll: Callable[..., Any]
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(rlvr_tree))
    out = tmp_path / "page.html"

    result = reroll(
        "simulate",
        "run.yaml",
        "--steps",
        "4",
        "--vary",
        "rollout.max_staleness=0,2",
        "--search",
        "--page",
        str(out),
        cwd=tmp_path,
    )

    assert result.returncode == 0, result.stderr
    assert "max_staleness=2" in result.stdout
    assert "cheapest" in result.stdout
    assert "max_staleness=0" in out.read_text()


def test_lengths_pick_by_seed_alone() -> None:
    drawn = Drawn(np.arange(1000.0), 3)
    assert [drawn.of(seed) for seed in range(5)] == [drawn.of(seed) for seed in range(5)]
    assert len({drawn.of(seed) for seed in range(100)}) > 80


def test_a_run_whose_groups_are_all_filtered_is_given_up(tmp_path: Path) -> None:
    rollout = RolloutConfig(prompts_per_step=2, group_size=2, drop_zero_variance_groups=True)

    with pytest.raises(RerollError, match="drop_zero_variance_groups"):
        simulate(rollout, workload(rewards=fixed(1)), system(), num_steps=4, folder=tmp_path)


def test_slow_environments_and_rewards_are_named_as_what_bounds_a_step(tmp_path: Path) -> None:
    rollout = RolloutConfig(prompts_per_step=2, group_size=2)
    played = simulate(rollout, workload(turns=fixed(3), env_s=fixed(9)), system(), num_steps=4, folder=tmp_path / "played")
    judged = simulate(rollout, workload(score_s=fixed(9)), system(), num_steps=4, folder=tmp_path / "judged")

    assert (played.bound, judged.bound) == ("envs", "rewards")
    assert sum(played.life.values()) == pytest.approx(1)


@pytest.mark.parametrize("take_window", [2, 5])
def test_a_window_wastes_no_tokens_and_favours_no_short_samples(tmp_path: Path, take_window: int) -> None:
    rollout = RolloutConfig(prompts_per_step=8, group_size=4, max_staleness=3)
    strict = simulate(rollout, workload(), system(), num_steps=12, folder=tmp_path / "strict")
    windowed = simulate(
        rollout.model_copy(update={"take_window": take_window}), workload(), system(), num_steps=12, folder=tmp_path / "window"
    )

    assert windowed.ends["aborted"] == windowed.wasted_tokens == 0
    assert windowed.step_s <= 1.1 * strict.step_s


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--lose", "nan"), "no time"),
        (("--turns", "1e9"), "largest value"),
        (("--lengths", "0"), "largest value"),
        (("--page", "nowhere/page.html"), "no folder"),
        (("--vary", "rollout.max_staleness=0", "--vary", "rollout.max_staleness=1"), "varied twice"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_work_starts(
    tmp_path: Path, rlvr_tree: dict[str, Any], reroll: Callable[..., Any], words: tuple[str, ...], told: str
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(rlvr_tree))

    result = reroll("simulate", "run.yaml", *words, cwd=tmp_path)

    assert result.returncode != 0
    assert told in result.stdout + result.stderr
    assert "simulated steps" not in result.stdout


def test_ctrl_c_ends_a_simulation_in_the_middle_and_leaves_nothing_running(tmp_path: Path) -> None:
    rollout = RolloutConfig(prompts_per_step=4, group_size=3, max_staleness=1)
    left: list[asyncio.Task[Any]] = []

    async def main() -> None:
        simulation = Simulation(rollout, workload(), system(), tmp_path)
        asyncio.get_running_loop().call_later(0.25, signal.raise_signal, signal.SIGINT)
        try:
            await simulation.run(1_000)
        finally:
            left.extend(task for task in asyncio.all_tasks() if task is not asyncio.current_task())

    with pytest.raises(KeyboardInterrupt):
        run_virtually(main())
    assert left == []
    assert audit(tmp_path / "journal", max_staleness=1).violations == []


def test_after_ctrl_c_the_command_shows_the_settings_that_were_simulated(
    tmp_path: Path, rlvr_tree: dict[str, Any], reroll: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(rlvr_tree))
    whole, labels = compare.run_case, []

    def interrupted_at_the_second(case: compare.Case, *, num_steps: int) -> Compared:
        labels.append(case.label)
        if len(labels) == 2:
            signal.raise_signal(signal.SIGINT)
        return whole(case, num_steps=num_steps)

    monkeypatch.setattr(compare, "run_case", interrupted_at_the_second)
    result = reroll("simulate", "run.yaml", "--steps", "4", "--vary", "rollout.max_staleness=0,1,2", cwd=tmp_path)

    assert result.returncode == 130
    assert "interrupted after 1 settings" in result.stdout
    assert "4 simulated steps" in result.stdout
    assert len(labels) == 2


def test_a_search_tries_the_planners_maps_where_the_devices_are_open(
    tmp_path: Path, rlvr_tree: dict[str, Any], reroll: Callable[..., Any]
) -> None:
    for role in ("policy", "engine"):
        rlvr_tree[role]["devices"] = "auto"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(rlvr_tree))
    words = ("--steps", "4", "--device", "h100", "--num", "2", "--vary", "rollout.max_staleness=0,1", "--search")

    result = reroll("simulate", "run.yaml", *words, "--page", "page.html", cwd=tmp_path)

    assert result.returncode == 0, result.stderr
    page = (tmp_path / "page.html").read_text()
    assert "policy.devices=0 engine.devices=1" in page
    assert "policy.devices=0 engine.devices=0" in page
    assert "engine.num_workers=1 rollout.max_staleness=1" in result.stdout.partition("cheapest")[2].replace("\n", " ")


@pytest.mark.parametrize(
    ("threads", "core_wait", "expected"), [(1, 0.0, 0.0), (2, 0.0, 1.0), (1, 0.5, 0.5), (1, 1.0, 1.0), (None, 0.0, 1.0)]
)
def test_on_a_cpu_parts_slow_each_other_as_far_as_cores_are_short(
    threads: int | None, core_wait: float, expected: float
) -> None:
    row = {"machine/core_wait": core_wait} | ({"machine/cores": 2.0, "machine/threads": float(threads)} if threads else {})

    assert sharing_of([row]) == pytest.approx(expected)
