"""What every engine must do, whatever is inside. The oracle is a packed forward pass over the tokens it wrote."""

from dataclasses import replace

import pytest
import torch
from engine_probe import (
    ask,
    assert_logprobs_are_the_trainers,
    finish,
    load,
    num_reusable,
    perturbed,
    trainer_logits,
)

from reroll.config.parts import LoraConfig
from reroll.types import FinishReason, PartialCompletion, WrittenTokens


def mixed_requests(num_prompts=5, num_siblings=3, **sampling):
    prompts = [[5 + (7 * i + j) % 90 for j in range(1 + 11 * i)] for i in range(num_prompts)]
    return [
        ask(f"{i}.{j}", prompt, seed=100 * i + j, max_tokens=4 + 5 * j + i, **sampling)
        for i, prompt in enumerate(prompts)
        for j in range(num_siblings)
    ]


def test_logprobs_are_the_trainers_for_siblings_of_mixed_length_in_moving_slots(make, oracle):
    requests = mixed_requests()
    done = finish(make(max_running=6), requests)
    assert_logprobs_are_the_trainers(oracle, requests, done)


def test_logprobs_ignore_what_top_p_and_top_k_cut_and_follow_the_temperature(make, oracle):
    requests = mixed_requests(num_prompts=3, temperature=0.7, top_p=0.8, top_k=20)
    assert_logprobs_are_the_trainers(oracle, requests, finish(make(), requests))


def test_greedy_takes_the_likeliest_token_and_reports_temperature_one(make, oracle):
    request = ask("a", [5, 9, 30], temperature=0.0)
    done = finish(make(), [request])
    assert_logprobs_are_the_trainers(oracle, [request], done)
    scores = trainer_logits(oracle, [*request.prompt_ids, *done["a"].token_ids])
    assert scores[2:-1].argmax(-1).tolist() == list(done["a"].token_ids)


def test_a_request_gives_the_same_tokens_whatever_it_is_batched_with(make):
    requests = mixed_requests()
    together = finish(make(max_running=4), requests)
    for request in requests[::4]:
        alone = finish(make(), [request])[request.id]
        assert alone.token_ids == together[request.id].token_ids


def begun(completion, num_tokens, *, version=0):
    """The first tokens of a completion, as an engine may be given them."""
    return WrittenTokens(
        token_ids=completion.token_ids[:num_tokens],
        logprobs=completion.logprobs[:num_tokens],
        versions=((version, num_tokens),) if num_tokens else (),
    )


def test_a_request_that_begins_with_tokens_goes_on_as_if_written_in_one_go_whoever_wrote_them(make, oracle):
    requests = mixed_requests(num_prompts=3)
    whole = finish(make(), requests)
    engine = make(max_running=4)
    continued = [
        replace(request, written=begun(whole[request.id], number % len(whole[request.id].token_ids)))
        for number, request in enumerate(requests)
    ]
    done = finish(engine, continued)
    for request in continued:
        ours, num_written = done[request.id], len(request.written.token_ids)
        assert replace(ours, logprobs=()) == replace(whole[request.id], logprobs=())
        assert ours.logprobs[:num_written] == request.written.logprobs
    assert_logprobs_are_the_trainers(oracle, requests, done)
    assert engine.counts.num_tokens == sum(
        len(done[request.id].token_ids) - len(request.written.token_ids) for request in continued
    )


def test_tokens_that_were_written_under_other_weights_keep_their_version(make, setup):
    engine, request = make(), ask("a", [5, 9], max_tokens=10, min_tokens=10)
    first = finish(engine, [request])["a"]
    engine.load_weights(dict(perturbed(load(setup[1])).named_parameters()), version=3)
    done = finish(engine, [replace(request, written=begun(first, 4))])["a"]
    assert done.token_ids[:4] == first.token_ids[:4]
    assert done.versions == ((0, 4), (3, 6))


@pytest.mark.parametrize("end", ["length", "stop token"])
def test_a_request_of_which_all_is_written_is_reported_as_it_is(make, end):
    seed, free = long_completion(make)
    stop_token_ids = (free.token_ids[4],) if end == "stop token" else ()
    request = ask("a", [5, 9], seed=seed, stop_token_ids=stop_token_ids)
    whole = finish(make(), [request])["a"]
    engine = make()
    assert finish(engine, [replace(request, written=begun(whole, len(whole.token_ids)))])["a"] == whole
    assert engine.counts.num_tokens == 0


def told(engine, partials):
    """Add what an engine tells of to what it told before."""
    block, end = engine.new_tokens(), 0
    if block is None:
        return 0
    for name, start, count, version in zip(block.request_ids, block.starts, block.counts, block.versions, strict=True):
        begin, end = end, end + count
        assert start == partials[name].num_tokens
        partials[name].add(block.token_ids[begin:end], block.logprobs[begin:end], version)
    assert end == len(block.token_ids) == len(block.logprobs)
    return end


def test_tokens_of_unfinished_requests_are_told_once_and_in_order_with_their_versions(make, setup):
    engine = make(max_running=3)
    requests = [ask(str(i), [5 + i, 9], max_tokens=12 + i, min_tokens=12 + i, seed=i) for i in range(4)]
    partials = {request.id: PartialCompletion() for request in requests}
    for request in requests:
        engine.submit(request)
    assert engine.new_tokens() is None
    for _ in range(3):
        engine.step()
    assert told(engine, partials) >= 6
    assert engine.new_tokens() is None
    engine.step()
    engine.load_weights(dict(perturbed(load(setup[1])).named_parameters()), version=3)
    for _ in range(2):
        engine.step()
    engine.sleep()
    assert told(engine, partials) >= 6
    engine.wake()
    done = finish(engine)
    for name, partial in partials.items():
        written = partial.written()
        assert written.token_ids == done[name].token_ids[: partial.num_tokens]
        assert written.logprobs == done[name].logprobs[: partial.num_tokens]
        assert sum(count for _, count in written.versions) == partial.num_tokens
    assert [version for version, _ in partials["0"].versions] == [0, 3]
    assert engine.new_tokens() is None


def test_siblings_differ_by_seed_and_repeat_with_it(make):
    requests = [ask(str(i), [7, 8, 9], seed=i % 2, min_tokens=12) for i in range(4)]
    done = finish(make(), requests)
    assert done["0"].token_ids == done["2"].token_ids != done["1"].token_ids == done["3"].token_ids


def test_siblings_share_one_prefill(make):
    engine = make()
    finish(engine, [ask(str(i), range(10, 90), seed=i) for i in range(8)])
    num_beyond_blocks = 80 - num_reusable(engine, 79) if engine.block_tokens > 1 else 0
    assert engine.counts.num_prefill_tokens == 80 + 7 * num_beyond_blocks


def test_a_sibling_that_comes_later_still_gets_the_trainers_logprobs(make, oracle):
    engine, requests = make(), [ask(str(i), range(10, 30), seed=i, min_tokens=12) for i in range(2)]
    engine.submit(requests[0])
    for _ in range(3):
        assert engine.step() == []
    done = finish(engine, requests[1:])
    assert_logprobs_are_the_trainers(oracle, requests, done)


def test_a_stop_token_ends_the_completion_and_stays_in_it(make):
    seed, free = long_completion(make)
    stop = free.token_ids[4]
    done = finish(make(), [ask("a", [5, 9], stop_token_ids=(stop,), seed=seed)])["a"]
    assert done.finish_reason is FinishReason.STOP
    assert done.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_a_stop_string_ends_the_completion_and_its_tokens_stay(make, setup):
    tokenizer = setup[2]
    seed, free = long_completion(make)
    text = tokenizer.decode(free.token_ids)
    stop = tokenizer.decode(free.token_ids[3:6])
    done = finish(make(), [ask("a", [5, 9], stop=("never written", stop), seed=seed)])["a"]
    assert done.finish_reason is FinishReason.STOP
    assert tokenizer.decode(done.token_ids) == text[: text.index(stop) + len(stop)]
    assert done.token_ids == free.token_ids[: len(done.token_ids)]


def test_min_tokens_holds_stop_tokens_back_without_changing_logprobs(make, oracle):
    stops = tuple(range(4, 60))
    requests = [ask(str(i), [5 + i, 9], min_tokens=6, stop_token_ids=stops, seed=i) for i in range(6)]
    done = finish(make(), requests)
    for completion in done.values():
        assert len(completion.token_ids) >= 6
        assert not set(completion.token_ids[:6]) & set(stops)
    assert_logprobs_are_the_trainers(oracle, requests, done)


def test_max_tokens_ends_a_completion_by_length(make):
    done = finish(make(), [ask("a", [5], max_tokens=3, min_tokens=3)])["a"]
    assert (len(done.token_ids), done.finish_reason) == (3, FinishReason.LENGTH)


def test_the_models_limit_ends_a_completion_by_length(make):
    done = finish(make(), [ask("a", [5] * 125, max_tokens=50, min_tokens=50)])["a"]
    assert (len(done.token_ids), done.finish_reason) == (3, FinishReason.LENGTH)


def test_a_prompt_longer_than_the_model_takes_is_refused_by_name_and_harms_no_other(make):
    engine = make()
    with pytest.raises(ValueError, match=r"request long .* 128 tokens"):
        engine.submit(ask("long", [5] * 128))
    assert set(finish(engine, [ask("short", [5])])) == {"short"}


def test_an_empty_prompt_is_refused(make):
    with pytest.raises(ValueError, match="empty prompt"):
        make().submit(ask("a", []))


def test_an_aborted_request_is_reported_with_the_tokens_it_had(make, oracle):
    engine = make(max_running=3)
    requests = [ask(str(i), [5 + i], min_tokens=12, seed=i) for i in range(5)]
    for request in requests:
        engine.submit(request)
    for _ in range(4):
        engine.step()
    for name in ("0", "4", "unknown"):
        engine.abort(name)
    done = finish(engine)
    assert done["0"].finish_reason is done["4"].finish_reason is FinishReason.ABORT
    assert (len(done["0"].token_ids), len(done["4"].token_ids)) == (4, 0)
    assert {name for name, completion in done.items() if len(completion.token_ids) == 12} == {"1", "2", "3"}
    assert_logprobs_are_the_trainers(oracle, [requests[i] for i in (0, 1, 2, 3)], done)


@pytest.mark.parametrize("end", ["abort", "stop token"])
def test_the_name_of_a_request_that_ended_may_be_used_again_at_once(make, oracle, end):
    """An engine that launches steps ahead has one more token in flight for the first of that name."""
    seed, whole = long_completion(make)
    engine, other = make(), ask("b", [30, 31], min_tokens=12, seed=seed)
    stops = (whole.token_ids[3],) if end == "stop token" else ()
    for request in (other, ask("a", [5, 9], seed=seed, stop_token_ids=stops)):
        engine.submit(request)
    num_tokens = whole.token_ids.index(whole.token_ids[3]) + 1
    reports = [finished for _ in range(num_tokens) for finished in engine.step()]
    if end == "abort":
        engine.abort("a")
    again = ask("a", [40, 41, 42], max_tokens=8, min_tokens=8, seed=7)
    engine.submit(again)
    [report] = reports or engine.step()
    assert (report.request_id, report.completion.token_ids) == ("a", whole.token_ids[:num_tokens])
    done = finish(engine)
    assert_logprobs_are_the_trainers(oracle, [again, other], done)
    assert done["a"].token_ids == finish(make(), [again])["a"].token_ids


def test_requests_in_flight_go_on_under_new_weights_and_say_which_wrote_what(make, setup, oracle):
    engine, new = make(), perturbed(load(setup[1]))
    first = ask("a", [5, 9], max_tokens=10, min_tokens=10)
    engine.submit(first)
    for _ in range(4):
        engine.step()
    engine.load_weights(dict(new.named_parameters()), version=3)
    later = ask("b", [5, 9], max_tokens=6, min_tokens=6, seed=1)
    done = finish(engine, [later])
    (old_version, num_old), (new_version, num_new) = done["a"].versions
    assert (old_version, new_version, num_old + num_new) == (0, 3, 10)
    assert num_old in (4, 5)  # One may have been in flight.
    head = replace(done["a"], token_ids=done["a"].token_ids[:num_old], logprobs=done["a"].logprobs[:num_old])
    assert_logprobs_are_the_trainers(oracle, [first], {"a": head})
    assert done["b"].versions == ((3, 6),)
    assert_logprobs_are_the_trainers(new, [later], done)


def test_new_weights_that_do_not_fit_are_refused(make, setup):
    weights = dict(load(setup[1]).named_parameters())
    name = next(iter(weights))
    with pytest.raises(ValueError, match="missing"):
        make().load_weights({key: value for key, value in weights.items() if key != name}, version=1)
    with pytest.raises(ValueError, match="unknown"):
        make().load_weights({**weights, "stranger": weights[name]}, version=1)
    with pytest.raises(ValueError, match="shape"):
        make().load_weights({**weights, name: weights[name][:1]}, version=1)


def test_weights_that_come_in_parts_are_used_when_the_last_has_come(make, setup):
    engine, new = make(), perturbed(load(setup[1]))
    weights, waiting = {name: weight.detach().clone() for name, weight in new.named_parameters()}, {}
    for start in range(0, len(names := list(weights)), 4):
        part = {name: weights.pop(name) for name in names[start : start + 4]}
        waiting |= engine.load_part(part)
        for tensor in part.values():
            tensor.zero_()  # They are lent for the call.
    engine.load_weights(waiting, version=2)
    request = ask("a", [5, 9], max_tokens=6, min_tokens=6)
    done = finish(engine, [request])
    assert done["a"].versions == ((2, 6),)
    assert_logprobs_are_the_trainers(new, [request], done)


def test_an_adapter_alone_is_enough_for_an_engine_that_holds_its_base(setup):
    open_engine, folder, _ = setup
    lora = LoraConfig(rank=4, alpha=8)
    engine, new = open_engine(folder, lora=lora), perturbed_adapter(load(folder, lora))
    request = ask("a", [5, 9], max_tokens=10, min_tokens=10)
    before = finish(engine, [request])["a"]
    engine.load_weights({name: weight for name, weight in new.named_parameters() if weight.requires_grad}, version=1)
    after = finish(engine, [request])["a"]
    assert after.versions == ((1, 10),)
    assert after.logprobs != before.logprobs
    assert_logprobs_are_the_trainers(new, [request], {"a": after})


def test_half_an_adapter_is_refused(setup):
    open_engine, folder, _ = setup
    lora = LoraConfig(rank=4)
    halves = {name: weight for name, weight in load(folder, lora).named_parameters() if "lora_A" in name}
    with pytest.raises(ValueError, match=r"missing .*lora_B"):
        open_engine(folder, lora=lora).load_weights(halves, version=1)


def test_sleep_keeps_requests_and_wake_continues_them(make, oracle):
    requests = mixed_requests(num_prompts=3)
    undisturbed = finish(make(max_running=4), requests)
    engine = make(max_running=4)
    for request in requests:
        engine.submit(request)
    done = {finished.request_id: finished.completion for _ in range(3) for finished in engine.step()}
    engine.sleep()
    engine.wake()
    done |= finish(engine)
    assert {name: completion.token_ids for name, completion in done.items()} == {
        name: completion.token_ids for name, completion in undisturbed.items()
    }
    assert_logprobs_are_the_trainers(oracle, requests, done)


def long_completion(make):
    """A seed under which nothing stops the first twelve tokens, and those tokens."""
    requests = [ask(str(seed), [5, 9], seed=seed) for seed in range(8)]
    done = finish(make(), requests)
    return next((seed, done[str(seed)]) for seed in range(8) if done[str(seed)].finish_reason is FinishReason.LENGTH)


def perturbed_adapter(model):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model
