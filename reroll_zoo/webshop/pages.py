"""The pages of the shop: what they say, what can be clicked, and a short name for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reroll_zoo.webshop.catalogue import Product

PAGE_SIZE = 10
NEXT, PREV, BACK, BUY = "Next >", "< Prev", "Back to Search", "Buy Now"
TABS = ("Description", "Features")

RULES = """You shop on a website for a customer. Find a product that fits the request, choose its options, and buy it.
Actions, one a turn:
search[words]: look for products; only on the search page.
click[label]: press what the page shows: an item id, an option's value, or a button.
Choose every option the customer asks for before click[Buy Now]: buying ends the visit. The price counts with the options."""


@dataclass(frozen=True, slots=True)
class SearchPage:
    """Where a visit starts."""

    name = "search"
    clickables: tuple[str, ...] = ()

    def text(self) -> str:
        return "Search page"

    def actions(self) -> str:
        return "search[words]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsPage:
    """Ten of the products that a search found."""

    words: tuple[str, ...]
    found: Sequence[Product]
    number: int = 0

    @property
    def listed(self) -> Sequence[Product]:
        return self.found[self.number * PAGE_SIZE : (self.number + 1) * PAGE_SIZE]

    @property
    def name(self) -> str:
        return f"results {self.number}: {' '.join(self.words)}"

    @property
    def clickables(self) -> tuple[str, ...]:
        return (*(product.id for product in self.listed), *self._buttons())

    def text(self) -> str:
        if not self.found:
            return "No results"
        first = self.number * PAGE_SIZE + 1
        lines = [f"{product.id} {dollars(product.base_price_cents)} {product.title}" for product in self.listed]
        return "\n".join([f"Results {first}-{first + len(lines) - 1} of {len(self.found)}", *lines])

    def actions(self) -> str:
        return _clicks((*(("item id",) if self.found else ()), *self._buttons()))

    def _buttons(self) -> list[str]:
        has_next = (self.number + 1) * PAGE_SIZE < len(self.found)
        return [*([NEXT] if has_next else []), *([PREV] if self.number else []), BACK]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPage:
    """A product, the options chosen so far, and the results it was opened from."""

    product: Product
    results: ResultsPage
    chosen: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How the item was found is left out, so that visits which meet here can be compared."""
        options = ", ".join(f"{name} {self.chosen[name]}" for name in sorted(self.chosen))
        return f"item {self.product.id} [{options}]"

    @property
    def clickables(self) -> tuple[str, ...]:
        return (*(value for _, values in self.product.options for value, _ in values), *TABS, BUY, PREV, BACK)

    def text(self) -> str:
        lines = [f"{self.product.id} {self.product.title}", f"Price: {dollars(self.product.price_cents(self.chosen))}"]
        for name, values in self.product.options:
            offered = ", ".join(f"{value} (+{dollars(cents)})" if cents else value for value, cents in values)
            lines.append(f"{name}: {offered}" + (f" -> {self.chosen[name]}" if name in self.chosen else ""))
        return "\n".join(lines)

    def actions(self) -> str:
        return _clicks(("option value", *TABS, BUY, PREV, BACK))


@dataclass(frozen=True, slots=True, kw_only=True)
class TabPage:
    """What an item page's tab says."""

    tab: str
    item: ItemPage
    clickables: tuple[str, ...] = (PREV, BACK)

    @property
    def name(self) -> str:
        return f"{self.tab} of {self.item.name}"

    def text(self) -> str:
        product = self.item.product
        lines = [product.description] if self.tab == "Description" else [f"- {feature}" for feature in product.features]
        return "\n".join([f"{self.tab} of {product.id}", *lines])

    def actions(self) -> str:
        return _clicks(self.clickables)


Page = SearchPage | ResultsPage | ItemPage | TabPage


def dollars(cents: int) -> str:
    """A price as the shop writes it; whole dollars without the zeros."""
    return f"${cents // 100}" if cents % 100 == 0 else f"${cents / 100:.2f}"


def _clicks(labels: Sequence[str]) -> str:
    return ", ".join(f"click[{label}]" for label in labels)
