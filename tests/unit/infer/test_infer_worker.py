import threading
import time

import pytest
import torch

from reroll.errors import WorkerError
from reroll.infer.base import Finished
from reroll.infer.worker import REPORT_EVERY, Abort, Failed, InferWorker, Submit
from reroll.models.load import load_model
from reroll.runtime.base import WorkerInfo
from reroll.types import FinishReason, Request, SamplingParams, TokenBlock
from reroll_zoo.tiny_models import make_tiny

INFO = WorkerInfo(role="engine", rank=0, world_size=1, device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), max_positions=4096))


@pytest.fixture
def worker(folder):
    worker = InferWorker(INFO, model=folder, precision="fp32", max_running=4)
    yield worker
    worker.close()


def ask(name, *, max_tokens=6, prompt=(5, 9)):
    return Request(id=name, prompt_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens))


def collect(worker, count, *, commands=(), timeout_s=60, kinds=(Finished, Failed)):
    events, deadline = [], time.monotonic() + timeout_s
    while len(events) < count and time.monotonic() < deadline:
        events += [event for event in worker.exchange(commands, wait_s=1.0).events if isinstance(event, kinds)]
        commands = ()
    return events


def test_tokens_are_told_while_they_are_written(worker):
    [block, *_] = collect(worker, 1, commands=[Submit(ask("a", max_tokens=2000))], kinds=(TokenBlock,))
    assert (block.request_ids, block.starts, block.counts) == (("a",), (0,), (REPORT_EVERY,))


def test_a_worker_that_is_paused_has_told_of_all_it_wrote(worker):
    worker.exchange([Submit(ask("a", max_tokens=2000))], wait_s=0.0)
    while not worker.stats().num_tokens:
        pass
    worker.pause()
    blocks = worker.exchange([], wait_s=0.0).events
    assert sum(len(block.token_ids) for block in blocks) == worker.stats().num_tokens


def test_submitted_requests_come_back_finished(worker):
    events = collect(worker, 6, commands=[Submit(ask(str(i))) for i in range(6)])
    assert sorted(event.request_id for event in events) == [str(i) for i in range(6)]
    assert all(len(event.completion.token_ids) == 6 for event in events)
    assert worker.stats().num_tokens == 36


def test_an_exchange_without_events_returns_after_its_wait(worker):
    started = time.monotonic()
    assert worker.exchange([], wait_s=0.2).events == ()
    assert time.monotonic() - started > 0.15


def test_a_request_that_cannot_run_fails_alone(worker):
    events = collect(worker, 2, commands=[Submit(ask("long", prompt=(5,) * 5000)), Submit(ask("fine"))])
    failed = next(event for event in events if isinstance(event, Failed))
    assert failed.request_id == "long"
    assert "max_prompt_tokens" in failed.reason
    assert any(isinstance(event, Finished) and event.request_id == "fine" for event in events)


def test_an_abort_reports_the_request_as_aborted(worker):
    worker.exchange([Submit(ask("a", max_tokens=4000))], wait_s=0.0)
    [event] = collect(worker, 1, commands=[Abort("a")])
    assert event.completion.finish_reason is FinishReason.ABORT


def test_nothing_is_written_while_paused(worker):
    worker.exchange([Submit(ask("a", max_tokens=2000))], wait_s=0.0)
    while worker.stats().num_tokens < 3:
        time.sleep(0.001)
    worker.pause()
    before = worker.stats().num_tokens
    time.sleep(0.05)
    assert worker.stats().num_tokens == before
    worker.resume()
    while worker.stats().num_tokens == before:
        time.sleep(0.001)


def test_sleep_and_wake_keep_requests_in_flight(worker):
    worker.exchange([Submit(ask("a", max_tokens=40))], wait_s=0.0)
    worker.sleep()
    worker.wake()
    [event] = collect(worker, 1)
    assert len(event.completion.token_ids) == 40


def test_weights_arrive_between_steps_and_are_tagged(worker, folder):
    weights = dict(load_model(folder, dtype=torch.float32, device="cpu").named_parameters())
    worker.exchange([Submit(ask("a", max_tokens=400))], wait_s=0.0)
    while worker.stats().num_tokens < 3:
        time.sleep(0.001)
    worker.load_weights(weights, version=7)
    [event] = collect(worker, 1)
    assert [version for version, _ in event.completion.versions] == [0, 7]
    assert sum(count for _, count in event.completion.versions) == 400


def test_weights_that_do_not_fit_are_the_callers_error_and_the_engine_goes_on(worker):
    with pytest.raises(ValueError, match="missing"):
        worker.load_weights({}, version=1)
    assert len(collect(worker, 1, commands=[Submit(ask("a"))])) == 1


def test_an_error_in_the_engines_thread_reaches_every_caller_with_its_traceback(worker, monkeypatch):
    def explode():
        raise RuntimeError("the cache is on fire")

    monkeypatch.setattr(worker._engine, "step", explode)
    with pytest.raises(WorkerError, match=r"(?s)Traceback.*the cache is on fire"):
        worker.exchange([Submit(ask("a"))], wait_s=30.0)
    with pytest.raises(WorkerError, match="on fire"):
        worker.pause()
    with pytest.raises(WorkerError, match="on fire"):
        worker.exchange([], wait_s=0.0)


def test_closing_wakes_who_waits_and_ends_the_thread(worker):
    errors = []

    def wait():
        try:
            worker.exchange([], wait_s=60.0)
        except WorkerError as error:
            errors.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    worker.close()
    waiter.join(60)
    assert errors == ["the engine is closed"]
    assert not worker._thread.is_alive()
