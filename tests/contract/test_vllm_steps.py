"""vLLM with a step in flight between two calls."""

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from engine_probe import DEVICE, ask, assert_logprobs_are_the_trainers, finish, load, open_embedded, perturbed, tiny_folder
from vllm_probe import launching_ahead, open_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("ahead"), "llama", hidden=128)


@pytest.fixture
def engine(folder):
    if DEVICE != "cpu":
        yield open_engine(folder)
        return
    with launching_ahead():
        yield open_engine(folder)


def core(engine):
    return engine._llm.engine_core.engine_core


def started(engine, *requests, num_steps):
    for request in requests:
        engine.submit(request)
    for _ in range(num_steps):
        assert engine.step() == []
    assert len(core(engine).batch_queue) == 1
    return engine


def test_every_step_writes_tokens_though_the_next_one_is_launched_first(engine):
    started(engine, ask("a", [5, 9], min_tokens=12), ask("b", [6], min_tokens=12), num_steps=3)
    assert engine.counts.num_tokens == 6
    assert [request.num_output_placeholders for request in core(engine).scheduler.requests.values()] == [1, 1]


def test_a_token_in_flight_belongs_to_the_old_weights_and_the_rest_to_the_new(engine, folder):
    request, new = ask("a", [5, 9], max_tokens=10, min_tokens=10), perturbed(load(folder))
    started(engine, request, num_steps=4).load_weights(dict(new.named_parameters()), version=3)
    assert not core(engine).batch_queue
    whole = finish(engine)["a"]
    assert whole.versions == ((0, 5), (3, 5))
    head = replace(whole, token_ids=whole.token_ids[:5], logprobs=whole.logprobs[:5])
    assert_logprobs_are_the_trainers(load(folder), [request], {"a": head})
    # The context is read again under the new weights: it is as if the rest had been asked for with it.
    rest = ask("a", [5, 9, *head.token_ids], max_tokens=5, min_tokens=5)
    tail = replace(whole, token_ids=whole.token_ids[5:], logprobs=whole.logprobs[5:])
    assert_logprobs_are_the_trainers(new, [rest], {"a": tail})


@pytest.mark.parametrize("disturb", ["load", "sleep"])
def test_a_request_whose_last_token_was_in_flight_is_reported_by_the_next_step(engine, folder, disturb):
    started(engine, ask("a", [5, 9], max_tokens=4, min_tokens=4), num_steps=3)
    if disturb == "load":
        engine.load_weights(dict(perturbed(load(folder)).named_parameters()), version=3)
    else:
        engine.sleep()
        engine.wake()
    assert engine.num_unfinished == 1
    [report] = engine.step()
    assert report.completion.versions == ((0, 4),)
    assert engine.num_unfinished == 0


def test_requests_interrupted_by_sleep_write_what_the_embedded_engine_does(engine, folder):
    requests = [ask(str(i), [5 + i, 9], max_tokens=20, min_tokens=6, seed=i) for i in range(6)]
    expected = finish(open_embedded(folder), requests)
    started(engine, *requests, num_steps=2)
    for _ in range(3):
        engine.step()
        engine.sleep()
        engine.wake()
    done = finish(engine)
    assert {name: each.token_ids for name, each in done.items()} == {name: each.token_ids for name, each in expected.items()}


def test_requests_that_vllm_puts_off_for_want_of_cache_lose_no_token_and_write_none_twice(engine, folder):
    requests = [ask(str(i), [5 + i] * 20, max_tokens=80, min_tokens=80, seed=i) for i in range(6)]
    expected = finish(open_embedded(folder), requests)
    pool = core(engine).scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 288 // engine.block_tokens)  # Less than half of what they need.
    for request in requests:
        engine.submit(request)
    known = list(core(engine).scheduler.requests.values())
    try:
        done = finish(engine)
    finally:
        pool.free_blocks(taken)
    assert any(request.num_preemptions for request in known)
    assert {name: each.token_ids for name, each in done.items()} == {name: each.token_ids for name, each in expected.items()}
    assert_logprobs_are_the_trainers(load(folder), requests, done)


def test_what_is_in_flight_for_ended_requests_writes_nothing(engine):
    started(engine, ask("a", [5, 9], min_tokens=12), num_steps=4).abort("a")
    [report] = engine.step()
    assert len(report.completion.token_ids) == engine.counts.num_tokens == 4
    later = ask("a", [5, 9], max_tokens=3, min_tokens=3)
    assert len(finish(engine, [later])["a"].token_ids) == 3
    assert engine.counts.num_tokens == 7
