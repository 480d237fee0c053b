"""A seeded synthetic catalogue. Every product is a function of (catalogue seed, its index), so none has to be stored."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from reroll_zoo.webshop.vocabulary import BRANDS, DEPARTMENTS, OptionGroup

_MODEL_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_NUM_MODEL_PREFIXES = len(_MODEL_LETTERS) ** 2
_PREFIX_STRIDE = 337  # Shares no factor with the number of prefixes, so neighbours get unlike prefixes and none repeats.
_KINDS = tuple((department, category) for department in DEPARTMENTS for category in department.categories)

Options = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """What the shop sells on one item page."""

    id: str
    department: str
    category: str
    brand: str
    model: str
    """A code that no other product has."""
    attributes: tuple[str, ...]
    """The first two stand in the title, all of them on the Features page."""
    options: Options
    """Name of each choice and its values, each with what it adds to the price in cents."""
    base_price_cents: int
    use: str

    @property
    def title(self) -> str:
        return f"{self.brand} {self.model} {' '.join(self.attributes[:2])} {self.category}"

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(f"{attribute} {self.category}" for attribute in self.attributes)

    @property
    def description(self) -> str:
        return f"{self.category.capitalize()} by {self.brand}, our {self.department} department. A good choice for {self.use}."

    def price_cents(self, chosen: Mapping[str, str]) -> int:
        """The price with these options; a choice that was not made adds nothing."""
        return self.base_price_cents + sum(dict(values)[chosen[name]] for name, values in self.options if name in chosen)


class Catalogue:
    """`num_products` products of one seed, made when asked for."""

    def __init__(self, *, seed: int = 0, num_products: int = 1000) -> None:
        if num_products < 10:
            raise ValueError(f"a catalogue holds at least 10 products, got {num_products}: set num_products")
        self.seed = seed
        self.num_products = num_products
        self._id_digits = max(4, len(str(num_products - 1)))
        # The pages of an episode show the same few products again and again.
        self._recent = lru_cache(maxsize=2048)(self._make)

    def __iter__(self) -> Iterator[Product]:
        """All products by index, one at a time."""
        return map(self._make, range(self.num_products))

    def product(self, index: int) -> Product:
        """The product at this index."""
        return self._recent(index)

    def index(self, product_id: str) -> int:
        """Where the product of this id stands."""
        return int(product_id[1:])

    def _make(self, index: int) -> Product:
        rng = random.Random(f"product/{self.seed}/{index}")
        department, category = rng.choice(_KINDS)
        low, high = department.categories[category]
        base_price_cents = rng.randint(low, high) * 100 - rng.choice((1, 1, 5, 50))
        num_groups = min(len(department.options), rng.choice((1, 2, 2, 3)))
        groups = sorted(rng.sample(range(len(department.options)), num_groups))
        return Product(
            id=f"B{index:0{self._id_digits}d}",
            department=department.name,
            category=category,
            brand=rng.choice(BRANDS),
            model=_model(index),
            attributes=tuple(rng.sample(department.attributes, rng.randint(3, 5))),
            options=tuple(_option(department.options[group], base_price_cents, rng) for group in groups),
            base_price_cents=base_price_cents,
            use=rng.choice(department.uses),
        )


def _model(index: int) -> str:
    number, prefix = divmod(index, _NUM_MODEL_PREFIXES)
    first, second = divmod(prefix * _PREFIX_STRIDE % _NUM_MODEL_PREFIXES, len(_MODEL_LETTERS))
    return f"{_MODEL_LETTERS[first]}{_MODEL_LETTERS[second]}{100 + number}"


def _option(group: OptionGroup, base_price_cents: int, rng: random.Random) -> tuple[str, tuple[tuple[str, int], ...]]:
    """A few of the group's values in its order; where they are priced, each costs a step more than the one before it."""
    num_values = min(len(group.values), rng.randint(3, 5))
    places = sorted(rng.sample(range(len(group.values)), num_values))
    step_dollars = max(1, base_price_cents * rng.randint(5, 20) // 10_000) if group.priced else 0
    return group.name, tuple((group.values[place], 100 * step_dollars * rank) for rank, place in enumerate(places))
