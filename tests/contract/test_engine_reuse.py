"""What an engine must do to reuse contexts: read less, and change nothing. Oracle: an engine without reuse, and the trainer."""

import torch
from engine_probe import (
    ask,
    assert_logprobs_are_the_trainers,
    finish,
    load,
    num_reusable,
    perturbed,
    trainer_logprobs,
)


def converse(engine, *, num_talks=5, num_turns=4, num_reply=9, forget=False, **sampling):
    """Conversations in lockstep: each turn's prompt is all that was said, and a reply. Returns requests and completions.

    An engine that is made to `forget` after every turn has nothing to reuse.
    """
    prompts = [[5 + (7 * i + j) % 90 for j in range(18 + i // 2)] for i in range(num_talks)]
    requests, done = [], {}
    for turn in range(num_turns):
        asked = [
            ask(f"{i}.{turn}", prompt, max_tokens=3 + i, seed=10 * i + turn, **sampling) for i, prompt in enumerate(prompts)
        ]
        answers = finish(engine, asked)
        if forget:
            engine.sleep()
            engine.wake()
        requests += asked
        done |= answers
        for i, prompt in enumerate(prompts):
            prompt += [*answers[f"{i}.{turn}"].token_ids, *(5 + (11 * turn + i + j) % 90 for j in range(num_reply))]
    return requests, done


def test_a_next_turn_reads_only_what_is_new_and_gets_the_trainers_logprobs(make, oracle):
    engine = make(max_running=4)
    requests, done = converse(engine)
    assert_logprobs_are_the_trainers(oracle, requests, done)
    later = [len(request.prompt_ids) for request in requests if not request.id.endswith(".0")]
    num_kept = sum(num_reusable(engine, length - 10) for length in later)  # Not the reply of 9; the last token was never read.
    least = num_kept if engine.block_tokens == 1 else 0.75 * num_kept  # Of blocks, a sliding window may have left one behind.
    assert engine.counts.num_reused_tokens >= least > 0
    num_asked = sum(len(request.prompt_ids) for request in requests)
    assert engine.counts.num_prefill_tokens == num_asked - engine.counts.num_reused_tokens


def test_reuse_changes_no_token_and_no_logprob(make):
    done, num_read = {}, {}
    for forget in (False, True):
        engine = make(max_running=4)
        requests, done[forget] = converse(engine, forget=forget)
        num_read[forget] = engine.counts.num_prefill_tokens
    assert num_read[False] < num_read[True] / (2 if engine.block_tokens == 1 else 1.3)
    for request in requests:
        got, want = done[False][request.id], done[True][request.id]
        assert got.token_ids == want.token_ids
        torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(want.logprobs), atol=1e-5, rtol=0)


def test_a_context_that_goes_another_way_is_reused_up_to_there(make, oracle):
    engine = make()
    finish(engine, [ask("a", range(10, 90))])
    edited = ask("b", [*range(10, 80), 7, 8, 9])
    assert_logprobs_are_the_trainers(oracle, [edited], finish(engine, [edited]))
    assert engine.counts.num_reused_tokens == num_reusable(engine, 70)
    again = ask("c", range(10, 90), seed=5)
    assert_logprobs_are_the_trainers(oracle, [again], finish(engine, [again]))
    assert engine.counts.num_reused_tokens == num_reusable(engine, 70) + num_reusable(engine, 79)


def test_siblings_of_a_next_turn_share_its_context(make, oracle):
    engine = make()
    first = finish(engine, [ask("a", range(10, 80), min_tokens=12)])["a"]
    requests = [ask(str(i), [*range(10, 80), *first.token_ids, 7, 8, 9, 6], seed=i) for i in range(3)]
    forks = [ask(f"fork {i}", [*range(10, 80), *first.token_ids, 20 + i], seed=i) for i in range(2)]
    before = engine.counts.num_prefill_tokens
    done = finish(engine, [*requests, *forks])
    assert_logprobs_are_the_trainers(oracle, [*requests, *forks], done)
    num_cached = num_reusable(engine, 70 + 11)
    siblings = [86] * (1 if engine.block_tokens == 1 else 3)  # They share what the first reads, or whole blocks of it.
    assert engine.counts.num_prefill_tokens - before == sum(length - num_cached for length in [*siblings, 83, 83])


def test_a_prompt_that_extends_a_running_one_reads_the_rest(make, oracle):
    engine, requests = make(), [ask("a", range(10, 80), min_tokens=12), ask("b", range(10, 85))]
    engine.submit(requests[0])
    engine.step()
    done = finish(engine, requests[1:])
    assert_logprobs_are_the_trainers(oracle, requests, done)
    num_reused = num_reusable(engine, 70)
    assert (engine.counts.num_prefill_tokens, engine.counts.num_reused_tokens) == (70 + 75 - num_reused, num_reused)


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


def test_sleep_forgets_cached_prefixes(make, oracle):
    engine = make()
    first = finish(engine, [ask("a", range(10, 40))])["a"]
    engine.sleep()
    engine.wake()
    request = ask("b", [*range(10, 40), *first.token_ids, 9])
    assert_logprobs_are_the_trainers(oracle, [request], finish(engine, [request]))
    assert engine.counts.num_reused_tokens == 0


def test_in_bf16_reuse_is_as_near_to_the_trainer_as_reading_everything(setup):
    open_engine, folder, _ = setup
    gaps = {}
    for forget in (False, True):
        model = load(folder, dtype=torch.bfloat16)
        engine = open_engine(folder, max_running=4, dtype=torch.bfloat16)
        requests, done = converse(engine, num_talks=10, num_turns=3, forget=forget)
        assert (engine.counts.num_reused_tokens > 0) != forget
        wanted = torch.cat([trainer_logprobs(model, request, done[request.id]) for request in requests])
        got = torch.tensor([logprob for request in requests for logprob in done[request.id].logprobs])
        gaps[forget] = (got - wanted).abs().mean().item()
    assert gaps[False] < 1.5 * gaps[True] + 1e-6
