"""Tasks of two steps, of small dynamic programming, and of parsing."""

from __future__ import annotations

from reroll_zoo.code_tasks.family import WORDS, Family, around, number, numbers, sentence

FAMILIES = (
    Family(
        name="filter_and_scale",
        says=(
            "multiplies each number in {xs} that is greater than {k} by {c} and returns the sum",
            "takes the numbers of {xs} above {k}, multiplies each by {c}, and adds them up",
        ),
        roles=("xs",),
        body="return sum({c} * i for i in {xs} if i > {k})",
        constants={"k": range(3, 40), "c": range(2, 15)},
        inputs=around("k"),
    ),
    Family(
        name="recurrence",
        says=(
            "returns term {n} of the sequence that starts {p}, {q} and goes on with the sum of the last two (term 0 is {p})",
            "starts with {p} and {q}, makes each next number the sum of the two before, and returns number {n}, counted from 0",
        ),
        roles=("n",),
        body="""i, j = {p}, {q}
for _ in range({n}):
    i, j = j, i + j
return i""",
        constants={"p": range(1, 15), "q": range(1, 20)},
        inputs=number(0, 15),
    ),
    Family(
        name="count_ways",
        says=(
            "returns in how many ways a stair of {n} steps can be climbed by 1 or {k} steps at a time",
            "returns the number of ordered ways to write {n} as a sum of ones and {k}s",
        ),
        roles=("n",),
        body="""ways = [1] * ({n} + 1)
for i in range({k}, {n} + 1):
    ways[i] = ways[i - 1] + ways[i - {k}]
return ways[{n}]""",
        constants={"k": range(2, 9)},
        inputs=number(1, 20),
    ),
    Family(
        name="best_run",
        says=(
            "returns the largest sum of consecutive numbers in {xs} (at least one number), plus {k}",
            "finds the contiguous part of {xs} with the largest sum, at least one number long, and returns its sum plus {k}",
        ),
        roles=("xs",),
        body="""best = total = {xs}[0]
for i in {xs}[1:]:
    total = max(i, total + i)
    best = max(best, total)
return best + {k}""",
        constants={"k": range(1, 30)},
        inputs=numbers(-15, 12, shortest=2, longest=8),
    ),
    Family(
        name="evaluate_sum",
        says=(
            "evaluates {s}, a sum such as '3+4-5', and returns its value times {k}",
            "reads {s}, whole numbers joined by + and - as in '3+4-5', and returns {k} times the result",
        ),
        roles=("s",),
        body="return {k} * sum(int(i) for i in {s}.replace('-', '+-').split('+'))",
        constants={"k": range(2, 20)},
        inputs=lambda rng, _: (
            str(rng.randint(1, 50)) + "".join(f"{rng.choice('+-')}{rng.randint(1, 50)}" for _ in range(rng.randint(1, 4))),
        ),
    ),
    Family(
        name="read_pairs",
        says=(
            "reads {s}, pairs such as 'a=1{sep}b=2', and returns a dict from each name to its number",
            "splits {s} at '{sep}' into pairs like 'a=1' and returns them as a dict of numbers",
        ),
        roles=("s",),
        body="return {{i.split('=')[0]: int(i.split('=')[1]) for i in {s}.split({sep!r})}}",
        constants={"sep": (",", ";", "|", " ", "&", "/", ":", ", ", "; ", " and ")},
        inputs=lambda rng, constants: (
            constants["sep"].join(f"{name}={rng.randint(0, 99)}" for name in rng.sample(WORDS, rng.randint(2, 4))),
        ),
    ),
    Family(
        name="caesar",
        says=(
            "shifts each lower-case letter of {w} forward by {k} in the alphabet, going round from z to a",
            "encodes {w}, a word of lower-case letters, with a Caesar cipher of shift {k}",
        ),
        roles=("w",),
        body="return ''.join(chr((ord(i) - 97 + {k}) % 26 + 97) for i in {w})",
        constants={"k": range(1, 26)},
        inputs=lambda rng, _: (rng.choice(WORDS),),
    ),
    Family(
        name="count_pairs",
        says=(
            "returns how many pairs of items at different places in {xs} add up to {k}",
            "counts the pairs of positions in {xs} whose numbers have the sum {k}",
        ),
        roles=("xs",),
        body="""count = 0
for i in range(len({xs})):
    for j in range(i):
        count += {xs}[i] + {xs}[j] == {k}
return count""",
        constants={"k": range(4, 30)},
        inputs=lambda rng, constants: ([constants["k"] // 2 + rng.randint(-2, 3) for _ in range(rng.randint(3, 7))],),
    ),
    Family(
        name="to_base",
        says=(
            "returns {n} written in base {k} as a string of digits",
            "converts the positive number {n} to base {k} and returns the digits as a string",
        ),
        roles=("n",),
        body="""digits = ''
while {n} > 0:
    digits = str({n} % {k}) + digits
    {n} //= {k}
return digits""",
        constants={"k": range(3, 10)},
        inputs=number(1, 500),
    ),
    Family(
        name="reverse_long_words",
        says=(
            "reverses each word of {s} that has more than {k} letters and returns the words joined by '{sep}'",
            "splits {s} at spaces, turns the words longer than {k} letters around, and joins all words with '{sep}'",
        ),
        roles=("s",),
        body="return {sep!r}.join(i[::-1] if len(i) > {k} else i for i in {s}.split())",
        constants={"k": range(2, 6), "sep": ("-", "_", "+", " ", ".", "/", "*", "|")},
        inputs=sentence,
    ),
    Family(
        name="common_prefix",
        says=(
            "returns the longest text that all strings in {ws} start with",
            "returns the longest common prefix of the strings in {ws}",
        ),
        roles=("ws",),
        body="""prefix = {ws}[0]
for i in {ws}:
    while not i.startswith(prefix):
        prefix = prefix[:-1]
return prefix""",
        inputs=lambda rng, _: (
            [
                stem + rng.choice(WORDS)[:3]
                for stem in [rng.choice(WORDS)[: rng.randint(0, 4)]]
                for _ in range(rng.randint(2, 4))
            ],
        ),
    ),
    Family(
        name="running_total",
        says=(
            "returns a list of the running totals of {xs}, starting from {k}",
            "adds the numbers of {xs} to {k} one after the other and returns the list of sums after each step",
        ),
        roles=("xs",),
        body="""total, result = {k}, []
for i in {xs}:
    total += i
    result.append(total)
return result""",
        constants={"k": range(1, 99)},
        inputs=numbers(shortest=2),
    ),
)
