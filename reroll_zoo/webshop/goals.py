"""What the customer asks for: a goal drawn from a product of the catalogue, and the words that say it.

Products are split once, by index: of every five the last is held out, the others are for training. Seeds below
`first_held_out_seed` walk through the training products, seeds from it on through the held-out ones. So no product is asked
for on both sides, and within a side different seeds ask for different products until all of them had their turn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from reroll_zoo.webshop.catalogue import Catalogue, Product

_SPLIT = 5
_SENTENCES = (
    "I am looking for {things}{options}, and I can pay at most ${limit}.",
    "I need {things}{options}, priced no higher than ${limit}.",
    "Find me {things}{options} for ${limit} or less.",
    "Please buy {things}{options}. My budget is ${limit}.",
    "I want to order {things}{options}, up to ${limit}.",
    "I would like {things}{options}; the price should stay within ${limit}.",
    "With ${limit} to spend, I want {things}{options}.",
    "My sister asked for {things}{options}. Do not pay more than ${limit}.",
    "For no more than ${limit}, get me {things}{options}.",
    "I ran out of {things}{options}. Please order again for at most ${limit}.",
    "We are shopping for {things}{options}, with a limit of ${limit}.",
    "Help me choose {things}{options} that cost ${limit} at most.",
    "I have ${limit}. I am after {things}{options}.",
    "Show me {things}{options}, maximum ${limit}, and buy it.",
    "It is time for new {things}{options}. Spend up to ${limit}.",
    "Could you purchase {things}{options}? It must not cost more than ${limit}.",
)
_THINGS = ((", ", "{attributes} {category}"), (" and ", "{attributes} {category}"), (" and ", "{category}, {attributes}"))
_OPTION_LISTS = (" with {}", " in {}", " ({})", ", {}", ", and I want {}")
_OPTION_WORDS = ("{name} {value}", "{value} {name}", "{name}: {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """An instruction and what a purchase is held against."""

    product_id: str
    """The product it was drawn from; others may serve the customer as well."""
    department: str
    category: str
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    max_price_cents: int
    instruction: str


def make_goal(catalogue: Catalogue, seed: int, *, first_held_out_seed: int) -> Goal:
    """The goal of this seed: its product by the split above; attributes, options, limit and wording from the seed."""
    product = catalogue.product(_product_index(catalogue, seed, first_held_out_seed=first_held_out_seed))
    rng = random.Random(f"goal/{catalogue.seed}/{seed}")
    attributes = tuple(rng.sample(product.attributes, rng.choice((1, 2, 2, 3))))
    named = rng.sample(product.options, rng.randint(1, len(product.options)))
    options = {name: rng.choice(values)[0] for name, values in named}
    max_price_cents = _price_limit_cents(product.price_cents(options), rng)
    return Goal(
        product_id=product.id,
        department=product.department,
        category=product.category,
        attributes=attributes,
        options=options,
        max_price_cents=max_price_cents,
        instruction=_instruction(product, attributes, options, max_price_cents, rng),
    )


def _product_index(catalogue: Catalogue, seed: int, *, first_held_out_seed: int) -> int:
    num_held_out = catalogue.num_products // _SPLIT
    if seed >= first_held_out_seed:
        return (seed - first_held_out_seed) % num_held_out * _SPLIT + _SPLIT - 1
    rank = seed % (catalogue.num_products - num_held_out)
    blocks, place = divmod(rank, _SPLIT - 1)
    return blocks * _SPLIT + place


def _price_limit_cents(price_cents: int, rng: random.Random) -> int:
    """A round number above the price, near enough to rule out dearer products."""
    step = 500 if price_cents < 5_000 else 1_000 if price_cents < 20_000 else 2_500
    return (price_cents // step + rng.randint(1, 3)) * step


def _instruction(
    product: Product, attributes: tuple[str, ...], options: Mapping[str, str], max_price_cents: int, rng: random.Random
) -> str:
    join, shape = rng.choice(_THINGS)
    things = shape.format(attributes=join.join(attributes), category=product.category)
    word = rng.choice(_OPTION_WORDS)
    choices = " and ".join(word.format(name=name, value=value) for name, value in options.items())
    listed = rng.choice(_OPTION_LISTS).format(choices)
    return rng.choice(_SENTENCES).format(things=things, options=listed, limit=max_price_cents // 100)
