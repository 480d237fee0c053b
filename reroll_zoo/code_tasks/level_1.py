"""Tasks that one expression solves."""

from __future__ import annotations

from reroll_zoo.code_tasks.family import WORDS, Family, number, numbers, sentence, word

FAMILIES = (
    Family(
        name="add_scaled",
        says=("returns {a} plus {k} times {b}", "adds {k} times {b} to {a}", "computes {a} + {k} * {b}"),
        roles=("a", "b"),
        body="return {a} + {k} * {b}",
        constants={"k": range(2, 60)},
        inputs=lambda rng, _: (rng.randint(-20, 50), rng.randint(-20, 50)),
    ),
    Family(
        name="scale_and_shift",
        says=("returns {k} times {n} plus {c}", "multiplies {n} by {k} and adds {c}", "computes {k} * {n} + {c}"),
        roles=("n",),
        body="return {k} * {n} + {c}",
        constants={"k": range(2, 30), "c": range(1, 50)},
        inputs=number(),
    ),
    Family(
        name="reverse_text",
        says=("returns {s} reversed", "returns the characters of {s} in reverse order", "turns {s} around"),
        roles=("s",),
        body="return {s}[::-1]",
        inputs=sentence,
    ),
    Family(
        name="repeat_word",
        says=("returns {w} repeated {k} times", "returns a string that holds {w} {k} times in a row"),
        roles=("w",),
        body="return {w} * {k}",
        constants={"k": range(2, 20)},
        inputs=word,
    ),
    Family(
        name="largest",
        says=("returns the largest number in the list {xs}", "returns the maximum of {xs}", "finds the biggest item of {xs}"),
        roles=("xs",),
        body="return max({xs})",
        inputs=numbers(),
    ),
    Family(
        name="sum_of_list",
        says=("returns the sum of the list {xs}", "adds up all numbers in {xs}", "returns the total of {xs}"),
        roles=("xs",),
        body="return sum({xs})",
        inputs=numbers(),
    ),
    Family(
        name="count_vowels",
        says=("returns how many vowels are in {s}", "counts the letters of {s} that are one of aeiou"),
        roles=("s",),
        body="return sum(c in 'aeiou' for c in {s})",
        inputs=sentence,
    ),
    Family(
        name="is_multiple",
        says=("returns True if {n} is divisible by {k}, else False", "tells whether {n} is a multiple of {k}"),
        roles=("n",),
        body="return {n} % {k} == 0",
        constants={"k": range(2, 30)},
        inputs=lambda rng, constants: (rng.choice((constants["k"] * rng.randint(1, 20), rng.randint(1, 200))),),
    ),
    Family(
        name="remainder",
        says=("returns the remainder of {n} divided by {k}", "computes {n} modulo {k}"),
        roles=("n",),
        body="return {n} % {k}",
        constants={"k": range(3, 60)},
        inputs=number(10, 500),
    ),
    Family(
        name="add_prefix",
        says=("puts '{p}' in front of {w}", "returns {w} with '{p}' before it"),
        roles=("w",),
        body="return {p!r} + {w}",
        constants={"p": WORDS},
        inputs=word,
    ),
    Family(
        name="first_items",
        says=("returns the first {k} items of the list {xs}", "returns a list of the first {k} numbers in {xs}"),
        roles=("xs",),
        body="return {xs}[:{k}]",
        constants={"k": range(2, 6)},
        inputs=numbers(shortest=4, longest=9),
    ),
    Family(
        name="at_least",
        says=("returns {n}, or {k} if {n} is smaller than {k}", "returns the larger of {n} and {k}"),
        roles=("n",),
        body="return max({n}, {k})",
        constants={"k": range(-20, 50)},
        inputs=lambda rng, constants: (constants["k"] + rng.randint(-5, 5),),
    ),
)
