"""What a purchase earns, after the WebShop paper (arXiv 2207.01206, section 3.1).

    r = r_type × (|attributes matched| + |options matched| + 1[price ≤ limit]) / (|U_att| + |U_opt| + 1)

The type score keeps the paper's four levels. The paper reads nouns from titles with a tagger; here the category's name is the
noun of every title, so the rule is on it:

    1.0   the category asked for
    0.5   another category whose name shares a word with it (hiking boots for ankle boots)
    0.1   no word in common, but the same department
    0.0   anything else

An attribute matches when the product has it. An option matches when it was chosen with the value asked for; a choice the
customer did not mention counts for nothing, but what it adds to the price does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reroll_zoo.webshop.catalogue import Product
from reroll_zoo.webshop.goals import Goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """How well a purchase serves its goal: shares of what was asked for, each from 0 to 1."""

    type_score: float
    attribute_score: float
    option_score: float
    price_score: float
    reward: float


def score_purchase(goal: Goal, product: Product, chosen: Mapping[str, str]) -> Purchase:
    """Judge buying `product` with these options."""
    type_score = _type_score(goal, product)
    num_attributes = sum(attribute in product.attributes for attribute in goal.attributes)
    num_options = sum(chosen.get(name) == value for name, value in goal.options.items())
    is_affordable = product.price_cents(chosen) <= goal.max_price_cents
    num_asked = len(goal.attributes) + len(goal.options) + 1
    return Purchase(
        type_score=type_score,
        attribute_score=num_attributes / len(goal.attributes),
        option_score=num_options / len(goal.options),
        price_score=float(is_affordable),
        reward=type_score * (num_attributes + num_options + is_affordable) / num_asked,
    )


def _type_score(goal: Goal, product: Product) -> float:
    if product.category == goal.category:
        return 1.0
    if set(product.category.split()) & set(goal.category.split()):
        return 0.5
    return 0.1 if product.department == goal.department else 0.0
