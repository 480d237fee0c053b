"""What an engine must do to reuse contexts: read less, and change nothing. Oracle: an engine without reuse, and the trainer."""

import torch
from engine_probe import (
    ask,
    assert_logprobs_are_the_trainers,
    finish,
    load,
    perturbed,
    trainer_logprobs,
)


def converse(engine, *, num_talks=5, num_turns=4, num_reply=9, **sampling):
    """Conversations in lockstep: each turn's prompt is all that was said, and a reply. Returns requests and completions."""
    prompts = [[5 + (7 * i + j) % 90 for j in range(18 + i // 2)] for i in range(num_talks)]
    requests, done = [], {}
    for turn in range(num_turns):
        asked = [
            ask(f"{i}.{turn}", prompt, max_tokens=3 + i, seed=10 * i + turn, **sampling) for i, prompt in enumerate(prompts)
        ]
        answers = finish(engine, asked)
        requests += asked
        done |= answers
        for i, prompt in enumerate(prompts):
            prompt += [*answers[f"{i}.{turn}"].token_ids, *(5 + (11 * turn + i + j) % 90 for j in range(num_reply))]
    return requests, done


def test_a_next_turn_reads_only_what_is_new_and_gets_the_trainers_logprobs(make, oracle):
    engine = make(max_running=4)
    requests, done = converse(engine)
    assert_logprobs_are_the_trainers(oracle, requests, done)
    num_later = sum(len(request.prompt_ids) for request in requests if not request.id.endswith(".0"))
    num_reply = 5 * 3 * (9 + 1)  # The last token written was never read.
    assert engine.counts.num_reused_tokens >= num_later - num_reply
    assert engine.counts.num_prefill_tokens <= sum(18 + i // 2 for i in range(5)) + num_reply


def test_reuse_changes_no_token_and_no_logprob(setup):
    kind, folder, tokenizer = setup
    with_reuse, without = (kind(load(folder), tokenizer, max_running=4, max_parked=size) for size in (8, 0))
    (requests, reused), (_, read) = (converse(engine) for engine in (with_reuse, without))
    assert with_reuse.counts.num_prefill_tokens < without.counts.num_prefill_tokens / 2
    for request in requests:
        got, want = reused[request.id], read[request.id]
        assert got.token_ids == want.token_ids
        torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(want.logprobs), atol=1e-5, rtol=0)


def test_in_bf16_reuse_is_as_near_to_the_trainer_as_reading_everything(setup):
    kind, folder, tokenizer = setup
    gaps = {}
    for max_parked in (16, 0):
        model = load(folder, dtype=torch.bfloat16)
        engine = kind(load(folder, dtype=torch.bfloat16), tokenizer, max_running=4, max_parked=max_parked)
        requests, done = converse(engine, num_talks=10, num_turns=3)
        assert (engine.counts.num_reused_tokens > 0) == (max_parked > 0)
        wanted = torch.cat([trainer_logprobs(model, request, done[request.id]) for request in requests])
        got = torch.tensor([logprob for request in requests for logprob in done[request.id].logprobs])
        gaps[max_parked] = (got - wanted).abs().mean().item()
    assert gaps[16] < 1.5 * gaps[0] + 1e-6


def test_a_context_that_goes_another_way_is_reused_up_to_there(make, oracle):
    engine = make()
    finish(engine, [ask("a", range(10, 50))])
    edited = ask("b", [*range(10, 40), 7, 8, 9])
    assert_logprobs_are_the_trainers(oracle, [edited], finish(engine, [edited]))
    assert engine.counts.num_reused_tokens == 30
    again = ask("c", range(10, 50), seed=5)
    assert_logprobs_are_the_trainers(oracle, [again], finish(engine, [again]))
    assert engine.counts.num_reused_tokens == 30 + 39


def test_siblings_of_a_next_turn_share_its_context(make, oracle):
    engine = make()
    first = finish(engine, [ask("a", range(10, 40))])["a"]
    requests = [ask(str(i), [*range(10, 40), *first.token_ids, 7, 8, 9, 6], seed=i) for i in range(3)]
    forks = [ask(f"fork {i}", [*range(10, 40), *first.token_ids, 20 + i], seed=i) for i in range(2)]
    before = engine.counts.num_prefill_tokens
    done = finish(engine, [*requests, *forks])
    assert_logprobs_are_the_trainers(oracle, [*requests, *forks], done)
    assert engine.counts.num_prefill_tokens - before == 5 + 2 + 2


def test_a_prompt_that_extends_a_running_one_reads_the_rest(make, oracle):
    engine, requests = make(), [ask("a", range(10, 40), min_tokens=12), ask("b", range(10, 45))]
    engine.submit(requests[0])
    engine.step()
    done = finish(engine, requests[1:])
    assert_logprobs_are_the_trainers(oracle, requests, done)
    assert (engine.counts.num_prefill_tokens, engine.counts.num_reused_tokens) == (30 + 5, 30)


def test_new_weights_never_reuse_what_the_old_ones_read(make, setup):
    engine, new = make(), perturbed(load(setup[1]))
    running = ask("running", range(50, 80), max_tokens=10, min_tokens=10)
    engine.submit(running)
    ended = ask("ended", range(10, 40), max_tokens=2, min_tokens=2)
    engine.submit(ended)
    while len(ends := engine.step()) == 0:
        pass
    engine.load_weights(dict(new.named_parameters()), version=1)
    later = [
        ask("a", [*range(10, 40), *ends[0].completion.token_ids, 9]),
        ask("b", [*range(50, 80), 9]),
    ]
    done = finish(engine, later)
    last = ask("c", [*range(50, 80), *done["running"].token_ids, 9])  # Its context was read by both.
    done |= finish(engine, [last])
    assert_logprobs_are_the_trainers(new, [*later, last], done)


def test_sleep_forgets_parked_contexts(make, oracle):
    engine = make()
    first = finish(engine, [ask("a", range(10, 40))])["a"]
    engine.sleep()
    engine.wake()
    request = ask("b", [*range(10, 40), *first.token_ids, 9])
    assert_logprobs_are_the_trainers(oracle, [request], finish(engine, [request]))
    assert engine.counts.num_reused_tokens == 0


def test_parked_contexts_are_bounded_and_the_oldest_go_first(setup):
    kind, folder, tokenizer = setup
    engine = kind(load(folder), tokenizer, max_running=4, max_parked=2)
    prompts = [range(10 + i, 40 + i) for i in range(3)]
    for i, prompt in enumerate(prompts):
        finish(engine, [ask(str(i), prompt, max_tokens=2)])
    for i, num_reused in ((0, 0), (2, 30)):
        finish(engine, [ask(f"again {i}", [*prompts[i], 5, 5])])
        assert engine.counts.num_reused_tokens == num_reused
