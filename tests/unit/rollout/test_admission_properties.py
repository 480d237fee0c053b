"""Whatever the config and the order of events: the promises of Admission hold."""

import random
from collections import Counter
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_fakes import Numbers

from reroll.data.prompts import Mix
from reroll.rollout.admission import Admission, AdmittedGroup

TURNS = st.sampled_from(["d", "ab", "aab", "abacab"])
OPTIONS = st.fixed_dictionaries(
    {
        "prompts_per_step": st.integers(1, 5),
        "max_staleness": st.integers(0, 4),
        "oversample": st.sampled_from([1.0, 1.1, 1.5, 2.0, 3.7]),
        "take_window": st.integers(1, 3),
        "long_rounds": st.booleans(),
    }
).map(lambda options: {**options, "long_rounds": options["long_rounds"] and not options["max_staleness"]})


class AdmissionMachine(RuleBasedStateMachine):
    """Drives an Admission by any legal order of calls, beside a journal of what became of each prompt."""

    @initialize(options=OPTIONS, turns=TURNS)
    def start(self, options, turns):
        self.options = options
        self.prompts = Numbers(turns)
        self.admission = self.make()
        self.running: list[AdmittedGroup[int]] = []
        self.finished: list[AdmittedGroup[int]] = []
        self.taken: list[AdmittedGroup[int]] = []
        self.promised: list[AdmittedGroup[int]] = []
        self.spent: list[int] = []
        """Prompts trained on or dropped."""
        self.issued: set[int] = set()
        self.versions_jumped = False
        self.has_kept = False
        self.kept = {}
        """By number, the versions of samples that are kept."""

    def make(self) -> Admission[int]:
        return Admission(
            self.prompts, max_drops=1, kept_versions=lambda number, prompt: self.kept.get(number, ()), **self.options
        )

    def forget(self, tickets):
        self.running = [ticket for ticket in self.running if ticket not in tickets]
        self.finished = [ticket for ticket in self.finished if ticket not in tickets]

    @rule()
    def admit(self):
        for ticket in self.admission.admit():
            assert ticket.version in (self.admission.version, *self.kept.get(ticket.number, ()))
            assert ticket.number not in self.issued
            self.issued.add(ticket.number)
            self.running.append(ticket)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), age=st.integers(0, 2))
    def keep(self, data, age):
        """Some sample of a group has tokens of this age."""
        ticket = data.draw(st.sampled_from(self.running))
        if ticket.version <= self.admission.version - age:
            self.kept.setdefault(ticket.number, []).append(self.admission.version - age)
            self.has_kept = True

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.sampled_from([True, True, True, False]))
    def finish(self, data, keep):
        ticket = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.admission.finish(ticket, keep=keep)
        self.finished += [ticket] if keep else []
        self.spent += [] if keep else [ticket.prompt]

    @precondition(lambda self: not self.taken)
    @rule()
    def promise(self):
        promised = self.admission.promise()
        assert all(ticket in self.finished and ticket not in self.promised for ticket in promised)
        self.promised += promised
        assert len(self.promised) <= self.options["prompts_per_step"]
        if self.options["take_window"] == 1 and self.options["oversample"] == 1.0 and len(self.prompts.shares) == 1:
            oldest = sorted(self.running + self.finished, key=lambda ticket: ticket.number)
            step = oldest[: self.options["prompts_per_step"]]
            assert self.has_kept or self.promised_now() == [ticket for ticket in step if ticket in self.finished]

    def promised_now(self):
        return sorted(self.promised, key=lambda ticket: ticket.number)

    @precondition(lambda self: not self.taken)
    @rule()
    def take(self):
        oldest = sorted(self.running + self.finished, key=lambda ticket: ticket.number)
        decision = self.admission.take()
        if decision is None:
            return
        self.taken = decision.groups
        assert all(ticket in self.taken for ticket in self.promised)
        numbers = [ticket.number for ticket in self.taken]
        assert len(numbers) == self.options["prompts_per_step"]
        assert numbers == sorted(numbers)
        assert all(ticket in self.finished for ticket in self.taken)
        assert all(self.admission.version - ticket.version <= self.options["max_staleness"] for ticket in self.taken)
        was_reassigned = any(self.admission.snapshot().num_reassigned_to.values())
        was_promised, self.promised = bool(self.promised), []
        if self.options["take_window"] == 1 and self.options["oversample"] == 1.0 and not (was_promised and was_reassigned):
            for domain in self.prompts.shares:
                took = [ticket for ticket in self.taken if ticket.domain == domain]
                assert took == [ticket for ticket in oldest if ticket.domain == domain][: len(took)]
        if self.options["oversample"] == 1.0 and (self.options["take_window"] == 1 or not was_reassigned):
            assert self.versions_jumped or self.has_kept or decision.returned == [], "without surplus nothing is ever wasted"
        self.forget(self.taken + decision.returned)
        self.issued -= {ticket.number for ticket in decision.returned}

    @precondition(lambda self: self.taken)
    @rule(version_step=st.sampled_from([1, 1, 1, 2, 3]))
    def release(self, version_step):
        version = self.admission.version + version_step
        self.versions_jumped |= version_step > 1
        returned = self.admission.release([ticket.number for ticket in self.taken], version=version)
        self.forget(returned)
        self.issued -= {ticket.number for ticket in returned}
        self.spent += [ticket.prompt for ticket in self.taken]
        self.taken = []

    @rule()
    def crash_and_resume(self):
        snapshot = self.admission.snapshot()
        self.admission = self.make()
        self.admission.restore(snapshot)
        live = self.running + self.finished + self.taken
        self.issued -= {ticket.number for ticket in live}
        self.running, self.finished, self.taken, self.promised = [], [], [], []

    @invariant()
    def no_prompt_is_lost_or_trained_twice(self):
        owed = [queued.prompt for queued in self.admission.snapshot().queue]
        assert sorted(owed + self.spent) == list(range(self.prompts.num_drawn))

    @invariant()
    def no_slot_leaks(self):
        assert self.admission.num_open == len(self.running) + len(self.finished)
        steps = self.options["max_staleness"] + 1
        num_surplus = -(-round(10 * self.options["prompts_per_step"] * (self.options["oversample"] - 1)) // 10)
        assert self.admission.num_open + len(self.taken) <= steps * self.options["prompts_per_step"] + num_surplus

    @invariant()
    def whatever_is_open_can_still_be_trained_on(self):
        earliest = self.admission.version + (1 if self.taken else 0)
        assert all(earliest - ticket.version <= self.options["max_staleness"] for ticket in self.running + self.finished)


AdmissionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
test_admission_keeps_its_promises_in_any_order_of_events = AdmissionMachine.TestCase


def run(admission, *, num_steps, fate, order):
    """Train `num_steps` steps; `fate(number)` says whether a group is kept, `order` picks which one ends next."""
    trained = []
    running = []
    for _ in range(num_steps):
        running += admission.admit()
        for _ in range(10_000):
            if decision := admission.take():
                break
            assert running, "nothing runs and nothing can be taken: a deadlock"
            ticket = running.pop(order(len(running)))
            admission.finish(ticket, keep=fate(ticket.number))
            running += admission.admit()
        else:
            raise AssertionError("10,000 groups ended without making a step")
        running = [ticket for ticket in running if ticket not in decision.returned]
        trained += decision.groups
        running += admission.admit()
        outdated = admission.release([ticket.number for ticket in decision.groups], version=admission.version + 1)
        running = [ticket for ticket in running if ticket not in outdated]
    return trained


def fate_of(seed):
    return lambda number: random.Random(seed * 1000 + number).random() > 0.3


@given(options=OPTIONS, turns=TURNS, seed=st.integers(0, 99))
def test_every_legal_config_makes_progress(options, turns, seed):
    rng = random.Random(seed)
    admission = Admission(Numbers(turns), **options)
    trained = run(admission, num_steps=12, fate=fate_of(seed), order=rng.randrange)
    assert len(trained) == 12 * options["prompts_per_step"]
    assert len({ticket.prompt for ticket in trained}) == len(trained)


@given(options=OPTIONS)
def test_no_prompt_starves_when_the_newest_always_end_first(options):
    options["long_rounds"] = False
    admission = Admission(Numbers(), **options)
    run(admission, num_steps=30, fate=lambda number: True, order=lambda num_running: num_running - 1)
    owed = [queued.prompt for queued in admission.snapshot().queue]
    num_slots = (options["max_staleness"] + 1 + options["oversample"]) * options["prompts_per_step"]
    trained_fewest = 30 * options["prompts_per_step"] - 4 * num_slots
    assert all(prompt >= trained_fewest for prompt in owed), "an early prompt is still waiting"


@given(options=OPTIONS, seed=st.integers(0, 99), num_steps_before=st.integers(0, 6))
def test_in_strict_order_a_resumed_run_trains_on_what_an_uninterrupted_one_does(options, seed, num_steps_before):
    options |= {"take_window": 1, "oversample": 1.0}
    fate = fate_of(seed)

    def fresh(first_prompt):
        return Admission(Numbers(first=first_prompt), **options)

    def names(tickets):
        return [(ticket.number, ticket.prompt) for ticket in tickets]

    whole = names(run(fresh(0), num_steps=10, fate=fate, order=random.Random(seed).randrange))
    interrupted = fresh(0)
    before = names(run(interrupted, num_steps=num_steps_before, fate=fate, order=random.Random(seed + 1).randrange))
    snapshot = interrupted.snapshot()
    resumed = fresh(snapshot.num_issued["d"])  # In strict order every ticket is a new prompt.
    resumed.restore(snapshot)
    after = names(run(resumed, num_steps=10 - num_steps_before, fate=fate, order=random.Random(seed + 2).randrange))
    assert before + after == whole


LONG = st.fixed_dictionaries(
    {
        "prompts_per_step": st.integers(1, 5),
        "oversample": st.sampled_from([1.1, 1.25, 1.5, 2.0]),
        "max_tries": st.integers(2, 4),
    }
).map(lambda options: {**options, "long_rounds": True})


def slowness(seed):
    """A heavy tail of lengths: a group's own, whatever becomes of it."""
    return lambda ticket: random.Random(f"{seed}/{ticket.number}").paretovariate(1.0)


def steps_of(admission, length, *, num_steps):
    """The groups of each step, where the shortest end first, and the length of the one that ended last before it."""
    steps, running = [], []
    for _ in range(num_steps):
        running = sorted(admission.admit(), key=length)
        awaited = 0.0
        while (taken := admission.take()) is None:
            ended = running.pop(0)
            admission.finish(ended, keep=True)
            awaited = length(ended)
        steps.append((taken.groups, awaited))
        admission.release([ticket.number for ticket in taken.groups], version=admission.version + 1)
    return steps


@given(options=LONG, turns=TURNS, seed=st.integers(0, 99))
def test_long_rounds_bound_who_waits_how_often_a_group_is_cut_and_train_on_nothing_twice(options, turns, seed):
    admission = Admission(Numbers(turns), **options)
    steps = steps_of(admission, slowness(seed), num_steps=40)
    trained = [ticket for groups, _ in steps for ticket in groups]
    assert len({ticket.number for ticket in trained}) == len(trained)
    # Where a step waits for another domain, groups that have ended may be sent back, which `max_tries` does not count.
    assert len(set(turns)) > 1 or all(ticket.num_tries <= options["max_tries"] for ticket in trained)
    waiting = Counter(queued.level for queued in admission.snapshot().queue)
    # Of each level a round's worth makes a round; what one step adds to it, and other domains' slots, may be over that.
    num_slots = round(options["prompts_per_step"] * options["oversample"] + 1)
    assert all(num <= 2 * num_slots for num in waiting.values()), waiting


def test_with_long_rounds_fewer_steps_await_what_is_slow():
    def awaited_s(seed, **options):
        """Of a step, for each second of its groups: who trains on short ones first gains nothing by it."""
        admission = Admission(Numbers(), prompts_per_step=16, **options)

        def length(ticket):
            return random.Random(f"{seed}/{ticket.number}").lognormvariate(0, 1.2)

        steps = steps_of(admission, length, num_steps=120)
        return sum(awaited for _, awaited in steps) / sum(length(ticket) for groups, _ in steps for ticket in groups)

    for seed in range(3):
        one, two = (awaited_s(seed, oversample=1.25, long_rounds=True, max_tries=tries) for tries in (2, 3))
        assert one < 0.9 * awaited_s(seed, oversample=1.25)
        assert two < one < 0.7 * awaited_s(seed)


@given(options=LONG, turns=TURNS, seed=st.integers(0, 99), num_steps_before=st.integers(0, 12))
def test_a_run_with_long_rounds_resumes_where_it_was_also_in_the_middle_of_one(options, turns, seed, num_steps_before):
    def fresh(num_drawn=0, num_turns=0):
        prompts = Numbers(turns, first=num_drawn)
        for _ in range(num_turns):
            prompts.next_domain()
        return Admission(prompts, **options), prompts

    def names(steps):
        return [[(ticket.number, ticket.prompt, ticket.num_tries) for ticket in groups] for groups, _ in steps]

    length = slowness(seed)
    whole, _ = fresh()
    expected = names(steps_of(whole, length, num_steps=20))
    before, drawn = fresh()
    first = names(steps_of(before, length, num_steps=num_steps_before))
    before.admit()
    snapshot = before.snapshot()
    after, prompts = fresh(drawn.num_drawn)
    prompts.turns = drawn.turns
    after.restore(snapshot)
    assert first + names(steps_of(after, length, num_steps=20 - num_steps_before)) == expected


class Mixed(Numbers):
    """Domains by weight, as the data's own mix gives them turns."""

    def __init__(self, weights):
        super().__init__(shares={f"d{index}": float(weight) for index, weight in enumerate(weights)})
        self.mix = Mix(weights)

    def next_domain(self):
        return f"d{self.mix.next()}"


@settings(max_examples=60)
@given(options=OPTIONS, weights=st.lists(st.integers(1, 9), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_after_any_step_every_domain_was_trained_on_within_one_of_its_share_whatever_is_dropped(options, weights, seed):
    rng = random.Random(seed)
    prompts = Mixed(weights)
    kept_rate = {domain: rng.choice([0.2, 0.5, 0.9, 1.0]) for domain in prompts.shares}
    domains = list(prompts.shares)

    def fate(number):
        return random.Random(f"{seed}/{number}").random() < kept_rate[domains[number % len(domains)]]

    admission = Admission(prompts, max_drops=1000, **options)
    trained = run(admission, num_steps=25, fate=fate, order=rng.randrange)
    counts = Counter()
    for num, ticket in enumerate(trained, start=1):
        counts[ticket.domain] += 1
        if num % options["prompts_per_step"] == 0:
            for domain, weight in zip(domains, weights, strict=True):
                assert abs(counts[domain] - Fraction(num * weight, sum(weights))) < 1


@settings(max_examples=40)
@given(options=OPTIONS, seed=st.integers(0, 99))
def test_a_domain_that_keeps_nothing_does_not_stall_the_others_and_costs_a_bounded_number_of_groups(options, seed):
    prompts = Mixed([2, 1, 1])
    num_started = Counter()

    def fate(number):
        num_started[number % 3] += 1
        return number % 3 != 0

    admission = Admission(prompts, max_drops=3, **options)
    trained = run(admission, num_steps=12, fate=fate, order=random.Random(seed).randrange)
    counts = Counter(ticket.domain for ticket in trained)
    assert counts["d0"] == 0
    assert abs(counts["d1"] - counts["d2"]) <= 4
    most_places = 12 * (options["prompts_per_step"] // 2 + 1)
    slots = (options["max_staleness"] + 1 + options["oversample"]) * options["prompts_per_step"]
    assert num_started[0] <= (3 + 2) * most_places + 12 * slots
