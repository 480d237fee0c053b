import asyncio
import collections
import contextlib
import random

import numpy as np
import pytest

from reroll.errors import RerollError, WorkerDied, WorkerError
from reroll.infer.base import Finished
from reroll.infer.cluster import CONCURRENCY, MAX_RESTARTS, InferCluster
from reroll.infer.worker import Abort, EngineReport, EngineStatus, Failed, InferWorker, Submit
from reroll.models.load import load_model
from reroll.runtime.base import Placement, Workers
from reroll.runtime.local import LocalRuntime
from reroll.types import Completion, FinishReason, Request, SamplingParams, TokenBlock, WrittenTokens
from reroll_zoo.tiny_models import make_tiny


def ask(name, *, prompt=(5, 9), max_tokens=5, min_tokens=5):
    return Request(id=name, prompt_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens))


def completion(*ids):
    return Completion(token_ids=ids, logprobs=(0.0,) * len(ids), finish_reason=FinishReason.STOP, versions=((0, len(ids)),))


class ScriptedWorkers(Workers[InferWorker]):
    """Stands in for remote workers: records commands and answers what the test puts into `events`."""

    def __init__(self, size, *, answers=True):
        super().__init__(size)
        self.answers = answers
        self.commands = [[] for _ in range(size)]
        self.events = [asyncio.Queue() for _ in range(size)]
        self.num_calls = 0
        self.errors = {}
        self.revivals = collections.Counter()
        self.has_room = True
        self.arrivals, self.left = [], []
        self.stopped = False

    async def one(self, rank, method, commands=(), *, wait_s=0.0, **_):
        if method is not InferWorker.exchange:
            if rank in self.errors:
                raise self.errors[rank]
            return None
        self.num_calls += 1
        self.commands[rank] += commands
        if self.answers:
            for command in commands:
                if isinstance(command, Submit):
                    self.events[rank].put_nowait(Finished(command.request.id, completion(1)))
        events = []
        if wait_s:
            with contextlib.suppress(TimeoutError):
                events.append(await asyncio.wait_for(self.events[rank].get(), wait_s))
        while not self.events[rank].empty():
            events.append(self.events[rank].get_nowait())
        if rank in self.errors:
            raise self.errors[rank]
        status = EngineStatus(
            num_tokens=len(events),
            num_prefill_tokens=0,
            num_reused_tokens=7 * len(events),
            num_steps=1,
            busy_s=0.5,
            num_unfinished=0,
            max_running=4,
        )
        return EngineReport(tuple(events), status)

    async def _restart(self, rank):
        self.revivals[rank] += 1
        if not self.has_room:
            raise RerollError("no room")
        self.errors.pop(rank, None)

    async def join(self, at_most):
        outcomes, self.arrivals = self.arrivals[:at_most], self.arrivals[at_most:]
        for _ in outcomes:
            self.commands.append([])
            self.events.append(asyncio.Queue())
        self.size += len(outcomes)
        return outcomes

    async def leave(self, rank):
        self.left.append(rank)

    async def stop(self, *, at_once=False):
        self.stopped = True


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_siblings_go_to_one_worker_and_prompts_are_spread_by_load():
    workers = ScriptedWorkers(3, answers=False)
    cluster = InferCluster(workers)
    tasks = [asyncio.create_task(cluster.generate(ask(f"{i}.{j}", prompt=(i, 1)))) for i in range(6) for j in range(4)]
    await settle()
    homes = collections.defaultdict(set)
    for rank, commands in enumerate(workers.commands):
        for command in commands:
            homes[command.request.prompt_ids].add(rank)
    assert all(len(ranks) == 1 for ranks in homes.values())
    assert [len(commands) for commands in workers.commands] == [8, 8, 8]
    await cluster.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def ranks_after(workers, cluster, prompts):
    """Ask for these prompts, one after the other; the worker each went to."""
    ranks = []
    for prompt in prompts:
        before = [len(commands) for commands in workers.commands]
        await cluster.generate(ask(f"{prompt}", prompt=prompt))
        ranks.append(next(rank for rank, commands in enumerate(workers.commands) if len(commands) > before[rank]))
    return ranks


async def occupy(workers, cluster, rank):
    """Leave requests unanswered until this worker, and no other, is busy."""
    workers.answers = False
    tasks = [asyncio.create_task(cluster.generate(ask(f"busy {i}", prompt=(900 + i,)))) for i in range(rank + 1)]
    await settle()
    for task in tasks[:rank]:
        task.cancel()
    await settle()
    workers.answers = True
    return tasks[rank]


async def test_a_next_turn_goes_where_the_last_one_was_though_others_are_idle():
    workers = ScriptedWorkers(2)
    cluster = InferCluster(workers)
    busy = await occupy(workers, cluster, 0)
    assert await ranks_after(workers, cluster, [(5, 6)]) == [1]
    other = await occupy(workers, cluster, 1)
    busy.cancel()
    await settle()  # Now worker 1 is busy, and worker 0 idle.
    assert await ranks_after(workers, cluster, [(5, 6, 1, 8, 9), (5, 6, 1, 8, 9, 1, 4)]) == [1, 1]
    assert await ranks_after(workers, cluster, [(5, 7)]) == [0]  # A common beginning alone binds nobody.
    await cluster.close()
    await asyncio.gather(busy, other, return_exceptions=True)


async def test_new_weights_free_conversations_from_their_workers():
    workers = ScriptedWorkers(2)
    cluster = InferCluster(workers)
    assert await ranks_after(workers, cluster, [(5, 6)]) == [0]
    busy = await occupy(workers, cluster, 0)
    assert await ranks_after(workers, cluster, [(5, 6, 1, 8)]) == [0]
    await cluster.load_weights({}, version=1)
    assert await ranks_after(workers, cluster, [(5, 6, 1, 8, 1, 9)]) == [1]
    await cluster.close()
    await asyncio.gather(busy, return_exceptions=True)


async def test_a_next_turn_leaves_a_worker_that_is_overloaded():
    workers = ScriptedWorkers(2)
    cluster = InferCluster(workers)
    assert await ranks_after(workers, cluster, [(5, 6)]) == [0]
    workers.answers = False
    tasks = [asyncio.create_task(cluster.generate(ask(str(i), prompt=(5, 6, 1, i)))) for i in range(65)]
    await settle()
    assert len(workers.commands[0]) == 66
    workers.answers = True
    assert await ranks_after(workers, cluster, [(5, 6, 1, 99)]) == [1]
    await cluster.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_many_siblings_overflow_to_idle_workers():
    workers = ScriptedWorkers(2, answers=False)
    cluster = InferCluster(workers)
    tasks = [asyncio.create_task(cluster.generate(ask(str(i)))) for i in range(400)]
    await settle()
    sizes = [len(commands) for commands in workers.commands]
    assert sum(sizes) == 400
    assert min(sizes) > 100
    await cluster.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_new_prompt_goes_to_the_least_loaded_engine_that_is_ready_whatever_came_and_went():
    rng = random.Random(0)
    cluster = InferCluster(ScriptedWorkers(5, answers=False))
    waiting = []
    for number in range(400):
        if waiting and rng.random() < 0.45:
            waiting.pop(rng.randrange(len(waiting))).cancel()
            await settle()
        if rng.random() < 0.1:
            await rng.choice([cluster.pause, cluster.resume])([rng.randrange(5)])
        loads = [state.load for state in cluster.states]
        ready = [state.rank for state in cluster.states if not state.is_away] or range(5)
        waiting.append(asyncio.create_task(cluster.generate(ask(str(number), prompt=(number,)))))
        await settle()
        [chosen] = [state.rank for state in cluster.states if state.load > loads[state.rank]]
        assert chosen in ready
        assert loads[chosen] == min(loads[rank] for rank in ready)
    await cluster.close()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_thousands_of_requests_take_few_calls():
    workers = ScriptedWorkers(2)
    cluster = InferCluster(workers)
    done = await asyncio.gather(*(cluster.generate(ask(str(i), prompt=(i // 8, 1))) for i in range(5000)))
    assert len(done) == 5000
    assert workers.num_calls < 100
    assert cluster.stats()["engine/in_flight"].value == 0
    await cluster.close()


async def test_cancelling_a_call_aborts_its_request():
    workers = ScriptedWorkers(1, answers=False)
    cluster = InferCluster(workers)
    task = asyncio.create_task(cluster.generate(ask("a")))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle()
    assert [type(command) for command in workers.commands[0]] == [Submit, Abort]
    workers.events[0].put_nowait(Finished("a", completion(3)))  # The late answer is nobody's.
    await settle()
    await cluster.close()


async def test_a_request_that_cannot_run_raises_its_reason():
    workers = ScriptedWorkers(1, answers=False)
    cluster = InferCluster(workers)
    task = asyncio.create_task(cluster.generate(ask("a")))
    await settle()
    workers.events[0].put_nowait(Failed("a", "request a has a prompt of 9 tokens"))
    with pytest.raises(ValueError, match="request a has a prompt"):
        await task
    await cluster.close()


async def test_an_engine_that_raises_fails_every_waiting_call_and_later_ones():
    workers = ScriptedWorkers(2, answers=False)
    cluster = InferCluster(workers)
    tasks = [asyncio.create_task(cluster.generate(ask(str(i), prompt=(i,)))) for i in range(4)]
    await settle()
    workers.errors[0] = WorkerError("engine[0]: the cache is on fire")
    workers.events[0].put_nowait(Failed("nobody", ""))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(result) for result in results] == ["engine[0]: the cache is on fire"] * 4
    with pytest.raises(WorkerError, match="on fire"):
        await cluster.generate(ask("later"))
    await cluster.close()


def kill(workers, rank):
    workers.errors[rank] = WorkerDied(f"engine[{rank}] was killed")
    workers.events[rank].put_nowait(Failed("nobody", ""))


async def test_the_requests_of_a_dead_engine_go_to_the_living_and_each_is_answered_once():
    workers = ScriptedWorkers(2, answers=False)
    cluster = InferCluster(workers)
    tasks = [asyncio.create_task(cluster.generate(ask(str(i), prompt=(i,)))) for i in range(6)]
    await settle()
    had = [{command.request.id for command in commands} for commands in workers.commands]
    assert [len(ids) for ids in had] == [3, 3]
    kill(workers, 0)
    await settle()
    assert {command.request.id for command in workers.commands[1]} == had[0] | had[1]
    assert [lane.load for lane in cluster._states] == [0, 6]
    for i in range(6):
        workers.events[1].put_nowait(Finished(str(i), completion(i)))
    assert [done.token_ids for done in await asyncio.gather(*tasks)] == [(i,) for i in range(6)]
    assert cluster.stats()["engine/alive"].value == 1
    await cluster.close()


def block(name, *, start, ids, version=0):
    return TokenBlock(
        request_ids=(name,),
        starts=(start,),
        counts=(len(ids),),
        versions=(version,),
        token_ids=np.array(ids, dtype=np.uint32),
        logprobs=-0.5 * np.array(ids),
    )


async def test_a_request_goes_on_from_the_last_token_that_its_dead_engine_told_of():
    workers, seen = ScriptedWorkers(2, answers=False), []
    cluster = InferCluster(workers)
    task = asyncio.create_task(cluster.generate(ask("a"), lambda ids, logprobs, version: seen.append((*ids, version))))
    await settle()
    for told in (block("a", start=0, ids=[3, 4]), block("a", start=2, ids=[5], version=1), block("nobody", start=0, ids=[6])):
        workers.events[0].put_nowait(told)
    await settle()
    kill(workers, 0)
    await settle()
    [moved] = workers.commands[1]
    assert moved.request.written == WrittenTokens(token_ids=(3, 4, 5), logprobs=(-1.5, -2.0, -2.5), versions=((0, 2), (1, 1)))
    workers.events[1].put_nowait(block("a", start=2, ids=[9]))  # As of an engine that was asked before: it does not fit.
    workers.events[1].put_nowait(block("a", start=3, ids=[7], version=1))
    workers.events[1].put_nowait(Finished("a", completion(3, 4, 5, 7, 8)))
    assert (await task).token_ids == (3, 4, 5, 7, 8)
    assert seen == [(3, 4, 0), (5, 1), (7, 1)]
    await cluster.close()


async def test_after_a_death_conversations_and_new_prompts_go_to_the_living():
    workers = ScriptedWorkers(2)
    cluster = InferCluster(workers)
    assert await ranks_after(workers, cluster, [(5, 6)]) == [0]
    busy = await occupy(workers, cluster, 0)
    kill(workers, 0)
    await settle()
    assert await ranks_after(workers, cluster, [(5, 6, 1, 8), (7, 7)]) == [1, 1]
    await cluster.close()
    await asyncio.gather(busy, return_exceptions=True)


async def test_a_death_found_out_by_a_push_of_weights_stops_nobody():
    workers = ScriptedWorkers(2)
    cluster = InferCluster(workers)
    workers.errors[1] = WorkerDied("engine[1] was killed")
    await cluster.load_weights({}, version=1)
    await cluster.pause()
    await cluster.resume()
    assert await ranks_after(workers, cluster, [(5,), (6,)]) == [0, 0]
    await cluster.close()


async def test_when_the_last_engine_dies_every_waiting_call_fails_and_later_ones():
    workers = ScriptedWorkers(2, answers=False)
    cluster = InferCluster(workers)
    tasks = [asyncio.create_task(cluster.generate(ask(str(i), prompt=(i,)))) for i in range(4)]
    await settle()
    kill(workers, 0)
    await settle()
    kill(workers, 1)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [WorkerDied] * 4
    with pytest.raises(WorkerDied):
        await cluster.generate(ask("later"))
    with pytest.raises(WorkerDied):
        await cluster.load_weights({}, version=1)
    await cluster.close()


async def test_a_request_that_moved_is_aborted_where_it_is_now():
    workers = ScriptedWorkers(2, answers=False)
    cluster = InferCluster(workers)
    task = asyncio.create_task(cluster.generate(ask("a")))
    await settle()
    kill(workers, 0)
    await settle()
    task.cancel()
    await settle()
    assert [type(command) for command in workers.commands[1]] == [Submit, Abort]
    assert [lane.load for lane in cluster._states] == [0, 0]
    await cluster.close()


@pytest.fixture
def _at_once(monkeypatch):
    monkeypatch.setattr("reroll.infer.cluster.RESTART_PAUSE_S", 0.0)


@pytest.mark.usefixtures("_at_once")
async def test_a_dead_engine_is_started_anew_and_serves_from_the_next_push_on():
    workers = ScriptedWorkers(2)
    cluster = InferCluster(workers)
    await cluster.load_weights({}, version=0)
    busy = await occupy(workers, cluster, 0)
    kill(workers, 0)
    await settle()
    assert workers.revivals == {0: 1}
    assert cluster.stats()["engine/alive"].value == 1
    assert await ranks_after(workers, cluster, [(5,), (6,)]) == [1, 1]
    await cluster.load_weights({}, version=1)
    assert cluster.stats()["engine/alive"].value == 2
    assert await ranks_after(workers, cluster, [(7,)]) == [0]
    await cluster.close()
    await asyncio.gather(busy, return_exceptions=True)


@pytest.mark.usefixtures("_at_once")
async def test_a_judges_engine_that_nobody_pushes_weights_to_serves_as_soon_as_it_is_back():
    workers = ScriptedWorkers(2)
    cluster = InferCluster(workers)
    busy = await occupy(workers, cluster, 0)
    kill(workers, 0)
    await settle()
    assert await ranks_after(workers, cluster, [(7,)]) == [0]
    await cluster.close()
    await asyncio.gather(busy, return_exceptions=True)


@pytest.mark.usefixtures("_at_once")
async def test_an_engine_for_which_there_is_no_room_is_given_up_after_a_few_tries():
    workers = ScriptedWorkers(2)
    workers.has_room = False
    cluster = InferCluster(workers)
    busy = await occupy(workers, cluster, 0)
    kill(workers, 0)
    await settle()
    assert workers.revivals == {0: MAX_RESTARTS}
    assert await ranks_after(workers, cluster, [(7,)]) == [1]
    await cluster.close()
    await asyncio.gather(busy, return_exceptions=True)


@pytest.mark.usefixtures("_at_once")
async def test_an_engine_does_not_come_back_to_a_device_that_another_role_has():
    workers = ScriptedWorkers(2)
    cluster = InferCluster(workers)
    await cluster.load_weights({}, version=0)
    await cluster.sleep([0])
    workers.errors[0] = WorkerDied("engine[0] was killed")
    await cluster.load_weights({}, version=1)  # Tells of the death.
    await settle()
    assert not workers.revivals
    await cluster.wake([0])
    await settle()
    assert workers.revivals == {0: 1}
    await cluster.close()


async def test_an_id_in_flight_cannot_be_used_again():
    workers = ScriptedWorkers(1, answers=False)
    cluster = InferCluster(workers)
    task = asyncio.create_task(cluster.generate(ask("a")))
    await settle()
    with pytest.raises(ValueError, match="already in flight"):
        await cluster.generate(ask("a"))
    assert not task.done()
    await cluster.close()
    await asyncio.gather(task, return_exceptions=True)


async def test_closing_fails_who_waits_and_stops_the_workers():
    workers = ScriptedWorkers(1, answers=False)
    cluster = InferCluster(workers)
    task = asyncio.create_task(cluster.generate(ask("a")))
    await settle()
    await cluster.close()
    with pytest.raises(WorkerError, match="closed"):
        await task
    assert workers.stopped
    await cluster.close()


async def test_stats_count_what_happened_since_the_last_reading():
    workers = ScriptedWorkers(1)
    cluster = InferCluster(workers)
    await cluster.generate(ask("a"))
    first = cluster.stats()
    assert first["engine/tokens"].value == 1
    assert first["engine/reused_tokens"].value == 7
    assert cluster.stats()["engine/tokens"].value == 0
    await cluster.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), max_positions=256))


async def test_real_workers_generate_pause_and_take_weights(folder):
    import torch

    async with LocalRuntime() as runtime:
        placement = Placement(role="engine", devices=("cpu", "cpu"), concurrency=CONCURRENCY)
        workers = await runtime.spawn(InferWorker, placement, model=folder, precision="fp32", max_running=8)
        cluster = InferCluster(workers)
        done = await asyncio.gather(*(cluster.generate(ask(str(i), prompt=(5 + i // 4, 9))) for i in range(24)))
        assert all(len(one.token_ids) == 5 for one in done)

        await cluster.pause()
        task = asyncio.create_task(cluster.generate(ask("later")))
        weights = dict(load_model(folder, dtype=torch.float32, device="cpu").named_parameters())
        await cluster.load_weights(weights, version=4)
        assert not task.done()
        await cluster.resume()
        assert (await task).versions == ((4, 5),)

        with pytest.raises(ValueError, match="request long"):
            await cluster.generate(ask("long", prompt=(5,) * 300))
        stats = cluster.stats()
        assert stats["engine/tokens"].value >= 24 * 5
        await cluster.close()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def test_an_engine_that_joins_serves_from_the_next_push_on_and_is_let_go_when_it_dies(monkeypatch):
    monkeypatch.setattr("reroll.infer.cluster.JOIN_PAUSE_S", 0.001)
    workers = ScriptedWorkers(1)
    cluster = InferCluster(workers, max_workers=2)
    await cluster.load_weights({}, version=0)
    await cluster.generate(ask("first"))
    workers.arrivals = [None, None]
    await until(lambda: workers.size == 2)
    assert len(workers.arrivals) == 1, "there may be two"
    await cluster.generate(ask("second", prompt=(7,)))
    assert not workers.commands[1], "it holds no weights of the policy yet"
    await cluster.load_weights({}, version=1)
    workers.answers = False
    tasks = [asyncio.create_task(cluster.generate(ask(name, prompt=(number,)))) for number, name in enumerate("abcd")]
    await until(lambda: len(workers.commands[1]) == 2)
    assert cluster.stats()["engine/alive"].value == 2
    workers.answers = True
    workers.errors[1] = WorkerDied("its node went", how="died")
    workers.events[1].put_nowait(Failed("nobody", "wakes the one who waits"))
    await until(lambda: workers.size == 3)
    assert workers.left == [1]
    assert sum(isinstance(command, Submit) for command in workers.commands[0]) == 6, "its requests went to the other"
    for command in workers.commands[0][2:]:
        workers.events[0].put_nowait(Finished(command.request.id, completion(1)))
    assert len(await asyncio.gather(*tasks)) == 4
    await cluster.close()


async def test_engines_that_cannot_be_started_are_not_tried_for_ever(monkeypatch, caplog):
    monkeypatch.setattr("reroll.infer.cluster.JOIN_PAUSE_S", 0.001)
    workers = ScriptedWorkers(1)
    cluster = InferCluster(workers, max_workers=9)
    workers.arrivals = [RerollError("no such driver")] * 20
    await cluster.generate(ask("first"))
    await until(lambda: "no more engines join" in caplog.text)
    assert await cluster.generate(ask("second", prompt=(7,)))
    await cluster.close()


async def test_a_cluster_that_does_not_say_where_there_is_room_ends_joining_and_not_the_run(monkeypatch, caplog):
    async def unreachable(at_most):
        raise RerollError("nobody answers")

    monkeypatch.setattr("reroll.infer.cluster.JOIN_PAUSE_S", 0.001)
    workers = ScriptedWorkers(1)
    monkeypatch.setattr(workers, "join", unreachable)
    cluster = InferCluster(workers, max_workers=9)
    await cluster.generate(ask("first"))
    await until(lambda: "no more engines join" in caplog.text)
    assert "engines could not join: nobody answers" in caplog.text
    assert await cluster.generate(ask("second", prompt=(7,)))
    await cluster.close()
