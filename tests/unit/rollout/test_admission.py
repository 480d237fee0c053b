import pytest
from rollout_fakes import Numbers

from reroll.rollout.admission import Admission, AdmittedGroup, Taken


def make(turns="d", **options) -> Admission[int]:
    return Admission(Numbers(turns), **{"prompts_per_step": 2, **options})


def finish_all(admission: Admission[int], tickets: list[AdmittedGroup[int]]) -> None:
    for ticket in tickets:
        admission.finish(ticket, keep=True)


def take(admission: Admission[int]) -> Taken[int]:
    taken = admission.take()
    assert taken is not None
    return taken


def numbers(tickets: list[AdmittedGroup[int]]) -> list[int]:
    return [ticket.number for ticket in tickets]


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_there_are_slots_for_as_many_steps_as_a_group_may_be_old(max_staleness):
    admission = make(max_staleness=max_staleness)
    assert len(admission.admit()) == (max_staleness + 1) * 2
    assert admission.admit() == []


def test_without_a_budget_nothing_starts_while_a_step_trains():
    admission = make()
    finish_all(admission, admission.admit())
    taken = take(admission)
    assert admission.admit() == []
    admission.release(numbers(taken.groups), version=1)
    assert [ticket.version for ticket in admission.admit()] == [1, 1]


def test_a_taken_group_keeps_its_slot_until_release():
    admission = make(max_staleness=1)
    first = admission.admit()
    finish_all(admission, first[:2])
    taken = take(admission)
    assert admission.admit() == []
    admission.release(numbers(taken.groups), version=1)
    assert len(admission.admit()) == 2


def test_a_filtered_group_frees_its_slot_at_once():
    admission = make()
    first, _ = admission.admit()
    admission.finish(first, keep=False)
    (refill,) = admission.admit()
    assert (refill.number, refill.prompt) == (2, 2)


def test_a_slot_freed_during_training_is_filled_only_if_the_group_can_still_be_fresh():
    admission = make(max_staleness=1)
    tickets = admission.admit()
    finish_all(admission, tickets[:2])
    take(admission)
    admission.finish(tickets[2], keep=False)
    (refill,) = admission.admit()
    assert refill.version == 0, "it is trained at version 1 at the earliest: one version late, which the budget allows"


def test_a_window_of_one_waits_for_the_oldest():
    admission = make(max_staleness=1)
    tickets = admission.admit()
    finish_all(admission, tickets[1:])
    assert admission.take() is None
    admission.finish(tickets[0], keep=True)
    assert numbers(take(admission).groups) == [0, 1]


def test_a_wider_window_lets_finished_groups_pass_a_slow_one():
    admission = make(max_staleness=1, take_window=2)
    tickets = admission.admit()
    finish_all(admission, tickets[1:])
    assert numbers(take(admission).groups) == [1, 2]


def test_a_wider_window_is_still_bounded():
    admission = make(max_staleness=2, take_window=2)
    tickets = admission.admit()
    finish_all(admission, tickets[3:])
    assert admission.take() is None, "only ticket 3 of the oldest four is finished"
    admission.finish(tickets[2], keep=True)
    assert numbers(take(admission).groups) == [2, 3]


def test_a_group_that_was_overtaken_is_waited_for_before_it_is_too_old():
    admission = make(max_staleness=1, take_window=2)
    tickets = admission.admit()
    finish_all(admission, tickets[1:3])
    first = take(admission)
    assert first.returned == []
    admission.release(numbers(first.groups), version=1)
    finish_all(admission, [tickets[3], *admission.admit()[:1]])
    assert admission.take() is None, "at version 2 ticket 0 would be two versions old"
    admission.finish(tickets[0], keep=True)
    second = take(admission)
    assert numbers(second.groups) == [0, 3]
    assert second.returned == []


def test_no_more_groups_are_overtaken_than_the_coming_steps_can_take():
    admission = make(max_staleness=2, take_window=3)
    tickets = admission.admit()
    finish_all(admission, tickets[4:])
    first = take(admission)
    assert numbers(first.groups) == [4, 5]
    admission.release([4, 5], version=1)
    finish_all(admission, admission.admit())
    assert admission.take() is None, "tickets 0 to 3 may be trained in this step and the next, two in each"
    finish_all(admission, tickets[2:3])
    assert admission.take() is None, "three would be left for a step of two"
    admission.finish(tickets[3], keep=True)
    assert numbers(take(admission).groups) == [2, 3]


def test_groups_that_a_jump_of_versions_made_too_old_are_sent_back_at_release():
    admission = make(max_staleness=1)
    tickets = admission.admit()
    finish_all(admission, tickets)
    taken = take(admission)
    assert admission.release(numbers(taken.groups), version=2) == tickets[2:]
    assert [(ticket.prompt, ticket.version) for ticket in admission.admit()[:2]] == [(2, 2), (3, 2)]


@pytest.mark.parametrize(("oversample", "num_started"), [(1.0, 100), (1.1, 110), (1.101, 111), (2.0, 200)])
def test_oversampling_starts_more_groups_than_a_step_needs(oversample, num_started):
    assert len(make(prompts_per_step=100, oversample=oversample).admit()) == num_started


def test_oversampling_stops_the_rest_when_enough_have_finished():
    admission = make(oversample=2.0)
    tickets = admission.admit()
    finish_all(admission, [tickets[1], tickets[3]])
    taken = take(admission)
    assert taken.groups == [tickets[1], tickets[3]]
    assert taken.returned == [tickets[0], tickets[2]]


def test_prompts_that_were_stopped_come_first_and_in_order():
    admission = make(oversample=2.0)
    tickets = admission.admit()
    finish_all(admission, [tickets[1], tickets[3]])
    admission.release(numbers(take(admission).groups), version=1)
    again = admission.admit()
    assert [ticket.prompt for ticket in again] == [0, 2, 4, 5]
    assert numbers(again) == [0, 2, 4, 5], "with other seeds it would be another sample, and a quicker one more often than not"


def test_a_finished_surplus_group_is_kept_for_the_next_step_if_the_budget_allows():
    admission = make(max_staleness=1, oversample=1.5)
    tickets = admission.admit()
    finish_all(admission, tickets[:3])
    taken = take(admission)
    assert taken.returned == []
    admission.release(numbers(taken.groups), version=1)
    admission.finish(tickets[3], keep=True)
    assert numbers(take(admission).groups) == [2, 3]


@pytest.mark.parametrize("max_tries", [1, 3, 5])
def test_a_prompt_that_is_always_slowest_is_waited_for_at_its_last_try(max_tries):
    admission = make(prompts_per_step=1, oversample=2.0, max_tries=max_tries)
    for version in range(max_tries):
        slow, fast = admission.admit()
        assert slow.prompt == 0
        assert slow.num_tries == version + 1
        admission.finish(fast, keep=True)
        taken = admission.take()
        if taken is None:
            break
        admission.release(numbers(taken.groups), version=version + 1)
    assert slow.num_tries == max_tries
    admission.finish(slow, keep=True)
    assert take(admission).groups == [slow]


def step(admission, fast):
    """Who is started, and who is trained on where these prompts end first, then all others in order."""
    started = admission.admit()
    order = sorted(started, key=lambda ticket: (ticket.prompt not in fast, ticket.prompt))
    while (taken := admission.take()) is None:
        admission.finish(order.pop(0), keep=True)
    admission.release(numbers(taken.groups), version=admission.version + 1)
    return [ticket.prompt for ticket in started], [ticket.prompt for ticket in taken.groups]


def test_what_is_cut_waits_for_a_long_round_that_awaits_all():
    admission = make(oversample=1.5, long_rounds=True, max_tries=2)
    assert step(admission, fast={1, 2}) == ([0, 1, 2], [1, 2])
    assert step(admission, fast={3, 5}) == ([3, 4, 5], [3, 5])
    assert admission.num_deferred == 2
    assert step(admission, fast={4}) == ([0, 4], [0, 4])
    assert step(admission, fast={6, 7}) == ([6, 7, 8], [6, 7])


def test_the_surplus_of_a_long_round_waits_for_a_longer_one():
    admission = make(prompts_per_step=1, oversample=2.0, long_rounds=True, max_tries=3)
    assert step(admission, fast={1}) == ([0, 1], [1])
    assert step(admission, fast={3}) == ([2, 3], [3])
    assert step(admission, fast={2}) == ([0, 2], [2])
    assert step(admission, fast={0}) == ([0], [0]), "the last try: nobody else is started, and it is awaited"
    assert admission.num_deferred == 0


def test_a_group_of_a_long_round_that_is_dropped_is_replaced_and_the_round_stays_long():
    admission = make(oversample=1.5, long_rounds=True, max_tries=2)
    step(admission, fast={1, 2})
    step(admission, fast={3, 5})
    slow, other = admission.admit()
    admission.finish(slow, keep=False)
    (replacement,) = admission.admit()
    assert (slow.prompt, other.prompt, replacement.prompt, replacement.num_tries) == (0, 4, 6, 1)
    admission.finish(replacement, keep=True)
    after = make(oversample=1.5, long_rounds=True, max_tries=2)
    after.restore(admission.snapshot())
    assert [ticket.prompt for ticket in after.admit()] == [4, 6], "also after a resume in its middle"
    assert admission.take() is None


def test_what_was_deferred_is_not_lost_where_long_rounds_are_turned_off():
    before = make(oversample=1.5, long_rounds=True)
    step(before, fast={1, 2})
    after = make(oversample=1.5)
    after.restore(before.snapshot())
    assert after.admit()[0].prompt == 0


def test_a_long_round_takes_of_a_domain_what_its_slots_allow():
    admission = make("ab", oversample=1.5, long_rounds=True, max_tries=2)
    slow = {0, 3}  # Of a.
    for _ in range(2):
        started = admission.admit()
        assert {ticket.prompt for ticket in started if ticket.domain == "a"} & slow
        finish_all(admission, [ticket for ticket in started if ticket.prompt not in slow])
        admission.release(numbers(take(admission).groups), version=admission.version + 1)
    assert admission.num_deferred == 2
    assert [(ticket.domain, ticket.prompt) for ticket in admission.admit()] == [("a", 0), ("b", 6)], "one of a waits on"


def test_taking_twice_without_release_is_refused():
    admission = make(max_staleness=1)
    finish_all(admission, admission.admit())
    take(admission)
    with pytest.raises(ValueError, match="call release before the next take"):
        admission.take()


def test_releasing_what_was_not_taken_is_refused():
    admission = make()
    admission.admit()
    with pytest.raises(ValueError, match=r"release all that was taken, once: groups \[\], got \[0\]"):
        admission.release([0], version=1)


def test_releasing_a_part_of_what_was_taken_is_refused():
    admission = make()
    finish_all(admission, admission.admit())
    take(admission)
    with pytest.raises(ValueError, match=r"groups \[0, 1\], got \[1\]"):
        admission.release([1], version=1)


def test_versions_only_grow():
    admission = make()
    finish_all(admission, admission.admit())
    admission.release(numbers(take(admission).groups), version=3)
    finish_all(admission, admission.admit())
    with pytest.raises(ValueError, match="version 2 is older than 3"):
        admission.release(numbers(take(admission).groups), version=2)


def test_a_group_ends_only_once():
    admission = make()
    first, _ = admission.admit()
    admission.finish(first, keep=True)
    with pytest.raises(ValueError, match="group 0 is not running"):
        admission.finish(first, keep=False)


def test_restore_comes_before_the_first_admission():
    admission = make()
    admission.admit()
    with pytest.raises(ValueError, match="restore before the first admission"):
        admission.restore(make().snapshot())


def test_a_restored_group_has_the_number_it_had_and_is_as_old_as_what_is_kept_of_it():
    prompts, kept = Numbers(), {2: [0, 1], 3: []}
    before = Admission(prompts, prompts_per_step=2, max_staleness=1)
    tickets = before.admit()
    finish_all(before, tickets[:2])
    before.release(numbers(take(before).groups), version=1)
    after = Admission(prompts, prompts_per_step=2, max_staleness=1, kept_versions=lambda number, prompt: kept.get(number, ()))
    after.restore(before.snapshot())
    again = after.admit()
    assert [(ticket.number, ticket.prompt, ticket.version) for ticket in again] == [(2, 2, 0), (3, 3, 1), (4, 4, 1), (5, 5, 1)]


def test_a_group_that_is_sent_back_goes_on_under_its_number_if_something_of_it_can_still_be_trained_on():
    kept = {0: [0, 1], 1: [0]}
    admission = make(
        prompts_per_step=2, oversample=2.0, max_staleness=1, kept_versions=lambda number, prompt: kept.get(number, ())
    )
    tickets = admission.admit()
    finish_all(admission, tickets[2:4])
    admission.release(numbers(take(admission).groups), version=1)
    again = admission.admit()
    assert [ticket.goes_on for ticket in tickets[:2]] == [True, True]
    assert {ticket.number: ticket.version for ticket in again} == {0: 0, 1: 0, 6: 1, 7: 1}
    assert list(admission._open["d"])[:2] == [0, 1]  # The first to be taken.
    finish_all(admission, tickets[4:])
    # At version 2, nothing of version 0 can be trained on: 0 goes on with the sample of version 1, and 1 begins anew.
    assert [(ticket.number, ticket.goes_on) for ticket in take(admission).returned] == [(0, True), (1, False)]
    admission.release([4, 5], version=2)
    assert [(ticket.prompt, ticket.number, ticket.version) for ticket in admission.admit()][:2] == [(0, 0, 1), (1, 1, 2)]


def test_a_restored_prompt_has_the_tries_it_had():
    before = make(prompts_per_step=1, oversample=2.0)
    _, fast = before.admit()
    before.finish(fast, keep=True)
    before.release(numbers(take(before).groups), version=1)
    assert [ticket.num_tries for ticket in before.admit()] == [2, 1]
    after = make(prompts_per_step=1, oversample=2.0)
    after.restore(before.snapshot())
    assert [ticket.num_tries for ticket in after.admit()] == [2, 1]


def test_a_snapshot_while_a_step_trains_counts_its_groups_as_not_trained_on():
    admission = make()
    finish_all(admission, admission.admit())
    take(admission)
    assert [queued.number for queued in admission.snapshot().queue] == [0, 1]


def domains(tickets: list[AdmittedGroup[int]]) -> str:
    return "".join(ticket.domain for ticket in tickets)


def test_places_belong_to_domains_in_the_order_of_their_turns():
    admission = make("aab", prompts_per_step=3)
    tickets = admission.admit()
    assert domains(tickets) == "aab"
    assert numbers(tickets) == [0, 2, 1], "a domain's tickets count by the number of domains: 0, 2, 4, … and 1, 3, 5, …"


def test_a_dropped_group_is_replaced_at_once_by_one_of_its_domain():
    admission = make("ab")
    a, b = admission.admit()
    assert admission.finish(a, keep=False) is None
    (replacement,) = admission.admit()
    assert (replacement.domain, replacement.number) == ("a", 2)
    finish_all(admission, [b])
    assert admission.take() is None
    admission.finish(replacement, keep=True)
    assert domains(take(admission).groups) == "ba"


def test_a_dropped_group_of_a_staleness_budget_lets_a_later_one_of_its_domain_move_up():
    admission = make("ab", max_staleness=1)
    tickets = admission.admit()
    assert domains(tickets) == "abab"
    admission.finish(tickets[0], keep=False)
    finish_all(admission, tickets[1:])
    assert domains(take(admission).groups) == "ba", "nobody waits for the replacement, and the mix holds"
    assert domains(admission.admit()) == "a"


def test_a_step_waits_for_the_domain_it_owes_though_others_have_finished_more():
    admission = make("ab", max_staleness=1)
    tickets = admission.admit()
    finish_all(admission, [ticket for ticket in tickets if ticket.domain == "a"])
    assert admission.take() is None
    finish_all(admission, [tickets[1]])
    assert domains(take(admission).groups) == "ab"


def test_a_domain_that_dropped_its_fill_cedes_its_place_to_another_for_this_step():
    admission = make("ab", max_drops=2)
    a, b = admission.admit()
    finish_all(admission, [b])
    for _ in range(2):
        assert admission.finish(a, keep=False) is None
        (a,) = admission.admit()
    assert admission.finish(a, keep=False) == "b"
    (recipient,) = admission.admit()
    finish_all(admission, [recipient])
    taken = take(admission)
    assert domains(taken.groups) == "bb"
    admission.release(numbers(taken.groups), version=1)
    assert domains(admission.admit()) == "ab", "its share of the next step is its own again"


def test_a_resumed_run_remembers_how_much_a_domain_has_dropped_for_this_step():
    prompts = Numbers("ab")
    before = Admission(prompts, prompts_per_step=2, max_drops=2)
    a, _ = before.admit()
    for _ in range(2):
        before.finish(a, keep=False)
        (a,) = before.admit()
    after = Admission(prompts, prompts_per_step=2, max_drops=2)
    after.restore(before.snapshot())
    a = next(ticket for ticket in after.admit() if ticket.domain == "a")
    assert after.finish(a, keep=False) == "b"


def test_a_domain_cedes_nothing_that_the_step_does_not_wait_for():
    admission = make("ab", max_staleness=1, max_drops=1)
    tickets = admission.admit()
    finish_all(admission, [tickets[0]])
    running = tickets[2]
    for _ in range(4):
        assert admission.finish(running, keep=False) is None
        (running,) = admission.admit()
        assert running.domain == "a"


def test_ceded_places_go_to_the_others_by_their_weight():
    admission = Admission(Numbers("abbc"), prompts_per_step=4, max_drops=1)
    recipients = []
    for version in range(1, 7):
        running = admission.admit()
        while running:
            ticket = running.pop()
            recipient = admission.finish(ticket, keep=ticket.domain != "a")
            recipients += [recipient] if recipient else []
            running += admission.admit()
        admission.release(numbers(take(admission).groups), version=version)
    assert sorted(recipients) == ["b"] * 4 + ["c"] * 2


def test_when_every_domain_has_dropped_its_fill_each_goes_on_trying():
    admission = make("ab", max_drops=1)
    running = admission.admit()
    given = []
    for _ in range(20):
        ticket = running.pop(0)
        given.append(admission.finish(ticket, keep=False))
        running += admission.admit()
    assert len(running) == 2
    assert given[-5:] == [None] * 5


def test_over_sampling_passes_over_a_slow_group_only_for_one_of_its_domain():
    admission = make("ab", oversample=1.5)
    a, b, second_a = admission.admit()
    finish_all(admission, [a, second_a])
    assert admission.take() is None, "two groups are finished, but the step owes one of b"
    finish_all(admission, [b])
    assert domains(take(admission).groups) == "ab"


def test_a_restored_plan_gives_the_same_places():
    prompts = Numbers("aab")
    before = Admission(prompts, prompts_per_step=2, max_staleness=1)
    finish_all(before, before.admit())
    before.release(numbers(take(before).groups), version=1)
    snapshot = before.snapshot()
    after = Admission(prompts, prompts_per_step=2, max_staleness=1)
    after.restore(snapshot)
    assert [ticket.domain for ticket in after.admit()][:2] == list(snapshot.slot_domains)
