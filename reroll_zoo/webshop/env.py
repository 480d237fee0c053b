"""WebShop: find, customise and buy what a customer asks for, in a text shop after the WebShop paper (arXiv 2207.01206)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from reroll.config.env_base import EnvConfig
from reroll.envs.base import InvalidAction, StepResult
from reroll.errors import EnvError
from reroll.types import Message
from reroll_zoo.full_text import query_words
from reroll_zoo.webshop.catalogue import Product
from reroll_zoo.webshop.goals import Goal, make_goal
from reroll_zoo.webshop.pages import BACK, BUY, NEXT, PAGE_SIZE, PREV, RULES, ItemPage, Page, ResultsPage, SearchPage, TabPage
from reroll_zoo.webshop.reward import score_purchase
from reroll_zoo.webshop.search import default_cache_dir, open_shop

_ACTION = re.compile(r"\s*(search|click)\s*\[(.*)\]\s*", re.IGNORECASE | re.DOTALL)


class WebShopConfig(EnvConfig):
    """Search a synthetic shop for what a customer asks, choose the options and buy. The reward is the WebShop paper's."""

    runs: ClassVar[str] = "reroll_zoo.webshop.env:WebShop"

    kind: Literal["webshop"] = "webshop"
    num_products: int = Field(default=1000, ge=10)
    """Size of the catalogue. Its search index is built once: 100,000 products take some 15 s and 25 MB."""
    catalogue_seed: int = Field(default=0, ge=0)
    """Different seeds give different shops."""
    max_steps: int = Field(default=15, ge=1)
    """A visit that has bought nothing by then is truncated with reward 0."""
    first_held_out_seed: int = Field(default=1_000_000, ge=0)
    """Seeds from here on ask for the fifth of the products that no lower seed asks for: take held-out tasks from them."""
    show_actions: bool = True
    """Whether each page ends with a line of the actions it takes."""
    cache_dir: Path | None = None
    """Folder of the search indexes. Default: $XDG_CACHE_HOME/reroll, or ~/.cache/reroll."""


class WebShop:
    """One visit to the shop.

    `search[words]` and `click[label]`, in any case. Buying ends the episode with the paper's reward (see `reward.py`), 1.0 for
    a perfect purchase; so does `max_steps`, with nothing. The catalogue is synthetic: (catalogue_seed, num_products) makes it,
    and its search index is built in `cache_dir` once. Seeds from `first_held_out_seed` on ask for products that no seed
    below it asks for (see `goals.py`).
    """

    def __init__(self, options: WebShopConfig) -> None:
        self.options = options
        self.catalogue, self._index = open_shop(
            seed=options.catalogue_seed, num_products=options.num_products, cache_dir=options.cache_dir or default_cache_dir()
        )
        self._goal: Goal | None = None
        self.page: Page = SearchPage()
        self._num_steps = 0
        self._is_over = False

    @property
    def goal(self) -> Goal:
        """What the customer asks for."""
        if self._goal is None:
            raise EnvError("the shop has no customer yet: reset it first")
        return self._goal

    def reset(self, seed: int) -> tuple[Message, ...]:
        self._goal = make_goal(self.catalogue, seed, first_held_out_seed=self.options.first_held_out_seed)
        self.page = SearchPage()
        self._num_steps = 0
        self._is_over = False
        first = f"Request: {self._goal.instruction}\n{self._observation()}"
        return Message(role="system", content=RULES), Message(role="user", content=first)

    def step(self, action: str) -> StepResult:
        goal = self.goal
        if self._is_over:
            raise EnvError("the visit is over: reset the shop before the next step")
        verb, argument = self._parse(action)
        self._num_steps += 1
        if isinstance(self.page, ItemPage) and argument == BUY:
            return self._buy(goal, self.page)
        before = self.page.name
        self.page = self._search(argument) if verb == "search" else self._click(argument)
        effective = float(self.page.name != before)
        self._is_over = self._num_steps >= self.options.max_steps
        if self._is_over:
            return StepResult(truncated=True, info={"effective": effective, "success": 0.0}, state=self.page.name)
        messages = (Message(role="user", content=self._observation()),)
        return StepResult(messages=messages, info={"effective": effective}, state=self.page.name)

    def close(self) -> None:
        """Nothing to give back: the index is shared by all environments of the process."""

    def solve(self) -> list[str]:
        """Actions from this page to a purchase that earns 1.0.

        The query is made of the customer's words, and the first product listed that can serve them fully is bought, so that a
        policy can learn to do the same. Should no result serve, the product the goal was drawn from is looked up by its model.
        """
        if self._is_over:
            return []
        page = self.page
        if isinstance(page, TabPage) and self._serves(page.item.product):
            return [f"click[{PREV}]", *self._purchase(page.item)]
        if isinstance(page, ItemPage) and self._serves(page.product):
            return self._purchase(page)
        if isinstance(page, ResultsPage) and (clicks := self._from_results(page)):
            return clicks
        leave = [] if isinstance(page, SearchPage) else [f"click[{BACK}]"]
        for query in self._queries():
            if clicks := self._from_results(self._search(query)):
                return [*leave, f"search[{query}]", *clicks]
        raise AssertionError(f"a product's model finds it: {self.goal.product_id}")

    def demonstration(self, seed: int, *, answer: str = "<answer>{action}</answer>") -> list[Message]:
        """The conversation of a perfect visit, for imitation. `answer` writes the action as the policy should."""
        conversation = list(self.reset(seed))
        for action in self.solve():
            conversation.append(Message(role="assistant", content=answer.format(action=action)))
            conversation.extend(self.step(action).messages)
        return conversation

    def _observation(self) -> str:
        return f"{self.page.text()}\nActions: {self.page.actions()}" if self.options.show_actions else self.page.text()

    def _parse(self, action: str) -> tuple[str, str]:
        """The verb, and the query or the label as the page spells it. Raises InvalidAction for what this page does not take."""
        match = _ACTION.fullmatch(action)
        if match is None:
            raise InvalidAction(f"Not an action. Here you can use: {self.page.actions()}")
        verb, argument = match[1].lower(), match[2].strip()
        if verb == "search":
            if not isinstance(self.page, SearchPage):
                raise InvalidAction(f"There is no search bar on this page: click[{BACK}] first.")
            if not argument:
                raise InvalidAction("The search is empty: write some words, as in search[wool socks].")
            return verb, argument
        for label in self.page.clickables:
            if label.lower() == argument.lower():
                return verb, label
        raise InvalidAction(f"Nothing on this page has that label. Here you can use: {self.page.actions()}")

    def _search(self, query: str) -> ResultsPage:
        words = query_words(query)
        return ResultsPage(words=words, found=[self.catalogue.product(index) for index in self._index.search(words)])

    def _click(self, label: str) -> Page:
        page = self.page
        if label == BACK or isinstance(page, SearchPage):
            return SearchPage()
        if isinstance(page, TabPage):
            return page.item
        if isinstance(page, ItemPage):
            return page.results if label == PREV else _on_item(page, label)
        if label in (NEXT, PREV):
            return replace(page, number=page.number + (1 if label == NEXT else -1))
        return ItemPage(product=self.catalogue.product(self.catalogue.index(label)), results=page)

    def _buy(self, goal: Goal, item: ItemPage) -> StepResult:
        self._is_over = True
        purchase = score_purchase(goal, item.product, item.chosen)
        info = {
            "effective": 1.0,
            "success": float(purchase.reward == 1.0),
            "type_score": purchase.type_score,
            "attribute_score": purchase.attribute_score,
            "option_score": purchase.option_score,
            "price_score": purchase.price_score,
        }
        return StepResult(reward=purchase.reward, terminated=True, info=info, state=f"bought {item.name}")

    def _queries(self) -> Iterable[str]:
        goal = self.goal
        things = f"{' '.join(goal.attributes)} {goal.category}"
        yield f"{things} {' '.join(goal.options.values())}"
        yield things
        yield self.catalogue.product(self.catalogue.index(goal.product_id)).model

    def _serves(self, product: Product) -> bool:
        """Whether the product, with the options asked for and no others, earns 1.0."""
        offered = {(name, value) for name, values in product.options for value, _ in values}
        options = self.goal.options
        return offered.issuperset(options.items()) and score_purchase(self.goal, product, options).reward == 1.0

    def _from_results(self, page: ResultsPage) -> list[str]:
        """Clicks that buy the first product that serves, on this page or a later one; none if there is no such product."""
        for place, product in enumerate(page.found[page.number * PAGE_SIZE :]):
            if self._serves(product):
                turns = [f"click[{NEXT}]"] * (place // PAGE_SIZE)
                return [*turns, f"click[{product.id}]", *self._purchase(ItemPage(product=product, results=page))]
        return []

    def _purchase(self, item: ItemPage) -> list[str]:
        """Clicks on the item page. A choice the customer did not ask for cannot be undone, so it is set to what adds least."""
        wanted = dict(self.goal.options)
        for name, values in item.product.options:
            if name in item.chosen and name not in wanted:
                wanted[name] = min(values, key=lambda value: value[1])[0]
        clicks = [value for name, value in wanted.items() if item.chosen.get(name) != value]
        return [f"click[{label}]" for label in (*clicks, BUY)]


def _on_item(page: ItemPage, label: str) -> Page:
    for name, values in page.product.options:
        if label in dict(values):
            return replace(page, chosen={**page.chosen, name: label})
    return TabPage(tab=label, item=page)
