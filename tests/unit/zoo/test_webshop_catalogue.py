import itertools
from dataclasses import replace

import pytest

from reroll_zoo.webshop.catalogue import Catalogue, Product
from reroll_zoo.webshop.goals import Goal, make_goal
from reroll_zoo.webshop.pages import BACK, BUY, NEXT, PREV, TABS
from reroll_zoo.webshop.reward import score_purchase
from reroll_zoo.webshop.vocabulary import DEPARTMENTS

BOOTS = Product(
    id="B0001",
    department="footwear",
    category="hiking boots",
    brand="Norvale",
    model="AB100",
    attributes=("waterproof", "vegan", "wide fit"),
    options=(("color", (("red", 0), ("black", 0))), ("size", (("8", 0), ("9", 500)))),
    base_price_cents=4_999,
    use="muddy trails",
)
GOAL = Goal(
    product_id="B0001",
    department="footwear",
    category="hiking boots",
    attributes=("waterproof", "vegan"),
    options={"color": "red"},
    max_price_cents=5_000,
    instruction="",
)


def test_the_right_product_with_the_right_options_earns_one() -> None:
    assert score_purchase(GOAL, BOOTS, {"color": "red"}).reward == 1.0


@pytest.mark.parametrize(
    ("product", "chosen", "reward"),
    [
        (BOOTS, {}, 3 / 4),
        (BOOTS, {"color": "black"}, 3 / 4),
        (BOOTS, {"color": "red", "size": "8"}, 1.0),
        (BOOTS, {"color": "red", "size": "9"}, 3 / 4),
        (replace(BOOTS, attributes=("vegan", "wide fit")), {"color": "red"}, 3 / 4),
        (replace(BOOTS, base_price_cents=5_000), {"color": "red"}, 1.0),
        (replace(BOOTS, base_price_cents=5_001), {"color": "red"}, 3 / 4),
        (replace(BOOTS, base_price_cents=9_000, attributes=("wide fit",)), {}, 0.0),
        (replace(BOOTS, category="ankle boots"), {"color": "red"}, 0.5),
        (replace(BOOTS, category="running shoes"), {"color": "red"}, 0.1),
        (replace(BOOTS, category="green tea", department="grocery"), {"color": "red"}, 0.0),
    ],
)
def test_the_reward_is_the_type_score_times_the_share_of_wishes_met(
    product: Product, chosen: dict[str, str], reward: float
) -> None:
    assert score_purchase(GOAL, product, chosen).reward == pytest.approx(reward)


def test_the_parts_of_a_purchase_are_shares_of_what_was_asked() -> None:
    purchase = score_purchase(GOAL, replace(BOOTS, attributes=("vegan",), category="ankle boots"), {})
    assert (purchase.type_score, purchase.attribute_score, purchase.option_score, purchase.price_score) == (0.5, 0.5, 0.0, 1.0)


def test_a_catalogue_is_the_same_on_every_machine() -> None:
    catalogue = Catalogue(seed=7)
    assert catalogue.product(42).title == "Juniper Hall PU100 shielded child safe charging cables"
    assert (
        make_goal(catalogue, 11, first_held_out_seed=1_000).instruction
        == "We are shopping for fat free, gluten free dark chocolate with flavor: hazelnut, with a limit of $20."
    )


def test_seeds_give_different_catalogues() -> None:
    first, second = Catalogue(seed=0), Catalogue(seed=1)
    same = sum(a.category == b.category for a, b in zip(first, second, strict=True))
    assert same < 50


def test_a_product_does_not_depend_on_the_size_of_the_catalogue() -> None:
    small, large = Catalogue(num_products=1_000).product(10), Catalogue(num_products=1_000_000).product(10)
    assert small.title == large.title
    assert (small.id, large.id) == ("B0010", "B000010")


def test_models_and_ids_are_unique() -> None:
    products = list(Catalogue(num_products=5_000))
    assert len({product.model for product in products}) == len({product.id for product in products}) == 5_000
    assert all(Catalogue(num_products=5_000).index(product.id) == place for place, product in enumerate(products))


def test_every_category_and_attribute_is_on_sale() -> None:
    products = list(Catalogue(num_products=5_000))
    assert {product.category for product in products} == {name for department in DEPARTMENTS for name in department.categories}
    sold = {(product.department, attribute) for product in products for attribute in product.attributes}
    assert sold == {(department.name, attribute) for department in DEPARTMENTS for attribute in department.attributes}


def test_prices_follow_the_options() -> None:
    products = list(Catalogue())
    surcharges = [cents for product in products for _, values in product.options for _, cents in values]
    assert any(surcharges)
    assert min(surcharges) == 0
    assert all(product.base_price_cents > 0 for product in products)


def test_no_two_labels_of_an_item_page_are_alike() -> None:
    buttons = [label.lower() for label in (*TABS, BACK, BUY, NEXT, PREV)]
    for department in DEPARTMENTS:
        labels = buttons + [value.lower() for group in department.options for value in group.values]
        assert len(set(labels)) == len(labels)
        assert not any("[" in label or "]" in label for label in labels)


def test_goals_name_what_their_product_has() -> None:
    catalogue = Catalogue()
    for seed in range(300):
        goal = make_goal(catalogue, seed, first_held_out_seed=1_000)
        product = catalogue.product(catalogue.index(goal.product_id))
        assert score_purchase(goal, product, goal.options).reward == 1.0
        named = itertools.chain(goal.attributes, goal.options.values(), [goal.category, str(goal.max_price_cents // 100)])
        assert all(words in goal.instruction for words in named)


def test_instructions_are_worded_in_many_ways() -> None:
    catalogue = Catalogue()
    openings = {make_goal(catalogue, seed, first_held_out_seed=1_000).instruction[:9] for seed in range(300)}
    assert len(openings) >= 14


def test_the_price_limit_rules_out_dearer_products() -> None:
    catalogue = Catalogue()
    for seed in range(300):
        goal = make_goal(catalogue, seed, first_held_out_seed=1_000)
        price_cents = catalogue.product(catalogue.index(goal.product_id)).price_cents(goal.options)
        assert price_cents < goal.max_price_cents <= price_cents + 7_500
