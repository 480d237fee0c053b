"""Tasks that one loop, one comprehension or one trick solves."""

from __future__ import annotations

from reroll_zoo.code_tasks.family import Family, around, multiples, number, numbers, repetitive, sentence

_LETTERS = tuple("aeinorst")

FAMILIES = (
    Family(
        name="sum_of_squares",
        says=(
            "returns the sum of the squares of the numbers in {xs} that are divisible by {k}",
            "adds up the squares of all multiples of {k} in {xs}",
        ),
        roles=("xs",),
        body="return sum(i * i for i in {xs} if i % {k} == 0)",
        constants={"k": range(2, 20)},
        inputs=multiples("k"),
    ),
    Family(
        name="second_largest",
        says=("returns the second largest number in {xs}", "finds the second biggest item of {xs}"),
        roles=("xs",),
        body="return sorted({xs})[-2]",
        inputs=lambda rng, _: (rng.sample(range(-20, 60), rng.randint(3, 7)),),
    ),
    Family(
        name="word_lengths",
        says=("returns a list of the lengths of the words in {s}", "splits {s} at spaces and returns the length of each word"),
        roles=("s",),
        body="return [len(i) for i in {s}.split()]",
        inputs=sentence,
    ),
    Family(
        name="digit_sum",
        says=("returns the sum of the digits of {n}, times {k}", "adds up the digits of {n} and multiplies the sum by {k}"),
        roles=("n",),
        body="return {k} * sum(int(i) for i in str({n}))",
        constants={"k": range(2, 40)},
        inputs=number(0, 99999),
    ),
    Family(
        name="run_lengths",
        says=(
            "returns a list of the lengths of the runs of equal characters in {s}, so 'aab' gives [2, 1]",
            "counts how long each run of the same character in {s} is: 'aab' gives [2, 1]",
        ),
        roles=("s",),
        body="""result = []
for i in range(len({s})):
    if i > 0 and {s}[i] == {s}[i - 1]:
        result[-1] += 1
    else:
        result.append(1)
return result""",
        inputs=repetitive,
    ),
    Family(
        name="count_greater",
        says=("returns how many numbers in {xs} are greater than {k}", "counts the items of {xs} above {k}"),
        roles=("xs",),
        body="return sum(i > {k} for i in {xs})",
        constants={"k": range(-20, 80)},
        inputs=around("k"),
    ),
    Family(
        name="keep_multiples",
        says=("returns a list of the numbers in {xs} that are divisible by {k}", "keeps only the multiples of {k} in {xs}"),
        roles=("xs",),
        body="return [i for i in {xs} if i % {k} == 0]",
        constants={"k": range(2, 30)},
        inputs=multiples("k"),
    ),
    Family(
        name="every_other",
        says=(
            "returns every {k}th character of {s}, beginning with the first",
            "takes the first character of {s} and each {k}th after it",
        ),
        roles=("s",),
        body="return {s}[::{k}]",
        constants={"k": range(4, 9)},
        inputs=lambda rng, _: ("".join(rng.choice("abcdefghijklmnop") for _ in range(rng.randint(9, 24))),),
    ),
    Family(
        name="replace_letter",
        says=("returns {s} with every '{old}' replaced by '{new}'", "replaces each letter '{old}' in {s} by '{new}'"),
        roles=("s",),
        body="return {s}.replace({old!r}, {new!r})",
        constants={"old": _LETTERS, "new": tuple("xzqwkvuy")},
        inputs=sentence,
    ),
    Family(
        name="long_words",
        says=(
            "returns a list of the words in {s} that have more than {k} letters",
            "returns the words of {s} longer than {k} letters, in order",
        ),
        roles=("s",),
        body="return [i for i in {s}.split() if len(i) > {k}]",
        constants={"k": range(2, 6)},
        inputs=sentence,
    ),
    Family(
        name="shift_all",
        says=("returns a list with {k} added to each number in {xs}", "adds {k} to every item of {xs} and returns the list"),
        roles=("xs",),
        body="return [i + {k} for i in {xs}]",
        constants={"k": range(2, 99)},
        inputs=numbers(),
    ),
    Family(
        name="without_repeats",
        says=(
            "returns {xs} without repeated numbers, in the order they first come",
            "removes duplicates from {xs} and keeps the order",
        ),
        roles=("xs",),
        body="return list(dict.fromkeys({xs}))",
        inputs=numbers(0, 4, shortest=3),
    ),
    Family(
        name="count_letter",
        says=("returns how many times the letter '{c}' occurs in {s}", "counts the '{c}' in {s}"),
        roles=("s",),
        body="return {s}.count({c!r})",
        constants={"c": _LETTERS},
        inputs=sentence,
    ),
)
