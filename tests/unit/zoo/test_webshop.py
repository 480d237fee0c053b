import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reroll.envs.base import InvalidAction, StepResult
from reroll.errors import EnvError
from reroll_zoo.full_text import query_words
from reroll_zoo.webshop.env import WebShop, WebShopConfig
from reroll_zoo.webshop.pages import SearchPage

HELD_OUT = 1_000_000


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("webshop")


@pytest.fixture
def shop(cache_dir: Path) -> WebShop:
    return WebShop(WebShopConfig(cache_dir=cache_dir))


def play(shop: WebShop, actions: list[str]) -> list[StepResult]:
    return [shop.step(action) for action in actions]


def text_of(outcome: StepResult) -> str:
    (message,) = outcome.messages
    assert message["role"] == "user"
    return message["content"]


def admissible(shop: WebShop) -> list[str]:
    """Every action this page takes. On the search page any words may be searched; the customer's stand for them."""
    if isinstance(shop.page, SearchPage):
        return [f"search[{' '.join(query_words(shop.goal.instruction))}]"]
    return [f"click[{label}]" for label in shop.page.clickables]


def random_visit(shop: WebShop, seed: int) -> float:
    rng = random.Random(seed)
    shop.reset(seed)
    while True:
        outcome = shop.step(rng.choice(admissible(shop)))
        if outcome.terminated or outcome.truncated:
            return outcome.reward


def test_the_first_message_gives_the_rules_and_the_second_the_request(shop: WebShop) -> None:
    system, user = shop.reset(3)
    assert system["role"] == "system"
    assert "search[" in system["content"]
    assert shop.goal.instruction in user["content"]
    assert user["content"].endswith("Actions: search[words]")


def test_the_oracle_earns_one_on_every_seed_within_the_limit(shop: WebShop) -> None:
    for seed in [*range(400), *range(HELD_OUT, HELD_OUT + 200)]:
        shop.reset(seed)
        outcomes = play(shop, shop.solve())
        assert len(outcomes) <= 7
        assert outcomes[-1].terminated
        assert outcomes[-1].reward == 1.0, shop.goal
        assert outcomes[-1].info["success"] == 1.0
        assert all(outcome.info["effective"] == 1.0 for outcome in outcomes)


def test_the_oracle_asks_in_the_customers_words(shop: WebShop) -> None:
    for seed in range(100):
        shop.reset(seed)
        words = shop.solve()[0].removeprefix("search[").removesuffix("]").split()
        assert all(word in shop.goal.instruction for word in words)


def test_clicking_at_random_earns_much_less_than_the_oracle(shop: WebShop) -> None:
    rewards = [random_visit(shop, seed) for seed in range(200)]
    assert 0.0 < sum(rewards) / len(rewards) < 0.3


def test_the_oracle_finds_its_way_from_any_page(cache_dir: Path) -> None:
    shop = WebShop(WebShopConfig(cache_dir=cache_dir, max_steps=100))
    for seed in range(150):
        rng = random.Random(seed)
        shop.reset(seed)
        for _ in range(rng.randint(1, 12)):
            shop.step(rng.choice([action for action in admissible(shop) if action != "click[Buy Now]"]))
        assert play(shop, shop.solve())[-1].reward == 1.0
        assert shop.solve() == []


def test_equal_seeds_and_actions_give_equal_episodes(cache_dir: Path) -> None:
    first, second = WebShop(WebShopConfig(cache_dir=cache_dir)), WebShop(WebShopConfig(cache_dir=cache_dir))
    for seed in range(20):
        assert first.reset(seed) == second.reset(seed)
        actions = first.solve()
        assert play(first, actions) == play(second, actions)


def test_train_and_held_out_seeds_ask_for_different_products(shop: WebShop) -> None:
    def asked(seeds: range) -> tuple[set[str], set[str]]:
        goals = []
        for seed in seeds:
            shop.reset(seed)
            goals.append(shop.goal)
        return {goal.product_id for goal in goals}, {goal.instruction for goal in goals}

    train_products, train_words = asked(range(2_000))
    held_products, held_words = asked(range(HELD_OUT, HELD_OUT + 2_000))
    assert not train_products & held_products
    assert not train_words & held_words
    assert len(train_products) == 800
    assert len(held_products) == 200


def test_seeds_that_share_a_product_word_their_wish_differently(shop: WebShop) -> None:
    shop.reset(0)
    first = shop.goal
    shop.reset(800)
    assert shop.goal.product_id == first.product_id
    assert shop.goal.instruction != first.instruction


def test_where_the_held_out_seeds_start_is_an_option(cache_dir: Path) -> None:
    shop = WebShop(WebShopConfig(cache_dir=cache_dir, first_held_out_seed=10))
    ids = []
    for seed in range(12):
        shop.reset(seed)
        ids.append(int(shop.goal.product_id[1:]))
    assert [index % 5 == 4 for index in ids] == [False] * 10 + [True] * 2


def test_result_pages_turn_forwards_and_back(shop: WebShop) -> None:
    shop.reset(0)
    first = text_of(shop.step("search[shoes]"))
    second = text_of(shop.step("click[Next >]"))
    assert first.startswith("Results 1-10 of ")
    assert second.startswith("Results 11-20 of ")
    assert "click[< Prev]" not in first
    assert text_of(shop.step("click[< Prev]")) == first
    while "click[Next >]" in admissible(shop):
        shop.step("click[Next >]")
    with pytest.raises(InvalidAction):
        shop.step("click[Next >]")


def test_an_item_page_shows_the_choice_and_its_price(shop: WebShop) -> None:
    product = next(p for p in shop.catalogue if any(values[1][1] > 0 for _, values in p.options))
    name, values = next((name, values) for name, values in product.options if values[1][1] > 0)
    shop.reset(0)
    play(shop, [f"search[{product.model}]", f"click[{product.id}]"])
    page = text_of(shop.step(f"click[{values[1][0].upper()}]"))
    cents = product.base_price_cents + values[1][1]
    assert f"Price: ${cents / 100:.2f}" in page
    assert f"-> {values[1][0]}" in page
    assert name in page


def test_choices_survive_a_look_at_the_features(shop: WebShop) -> None:
    shop.reset(0)
    *clicks, buy = shop.solve()
    chosen = play(shop, clicks)[-1]
    features = shop.step("click[features]")
    assert all(f"- {attribute} " in text_of(features) for attribute in shop.goal.attributes)
    assert shop.step("click[< prev]").state == chosen.state
    assert shop.step(buy).reward == 1.0


def test_a_choice_can_be_changed(shop: WebShop) -> None:
    shop.reset(0)
    product = shop.catalogue.product(shop.catalogue.index(shop.goal.product_id))
    name, values = product.options[0]
    play(shop, [f"search[{product.model}]", f"click[{product.id}]", f"click[{values[0][0]}]"])
    assert shop.step(f"click[{values[1][0]}]").state == f"item {product.id} [{name} {values[1][0]}]"


def test_an_action_that_changes_nothing_is_not_effective(shop: WebShop) -> None:
    shop.reset(0)
    *clicks, _ = shop.solve()
    play(shop, clicks)
    again = shop.step(clicks[-1])
    assert again.info == {"effective": 0.0}


@pytest.mark.parametrize(
    "action", ["SEARCH[Wool Socks]", " search [ wool  socks ] ", "search[wool socks]", "Search[\nwool\nsocks]"]
)
def test_case_and_spaces_do_not_matter(shop: WebShop, action: str) -> None:
    shop.reset(0)
    assert shop.step(action).state == "results 0: wool socks"


@pytest.mark.parametrize(
    "action",
    ["", "wool socks", "search", "search[]", "search[  ]", "click[Buy Now]", "click[]", "buy[now]", "search[a] then click[b]x"],
)
def test_words_that_are_no_action_leave_the_page_as_it_was(shop: WebShop, action: str) -> None:
    shop.reset(0)
    before = shop.solve()
    with pytest.raises(InvalidAction, match=r"(search|click)\["):
        shop.step(action)
    assert shop.solve() == before


def test_searching_needs_the_search_page(shop: WebShop) -> None:
    shop.reset(0)
    shop.step("search[wool socks]")
    with pytest.raises(InvalidAction, match="Back to Search"):
        shop.step("search[green tea]")
    assert shop.step("click[Back to Search]").state == "search"
    assert shop.step("search[green tea]").state == "results 0: green tea"


def test_an_item_that_is_not_listed_cannot_be_clicked(shop: WebShop) -> None:
    shop.reset(0)
    shop.step("search[wool socks]")
    other = next(product for product in shop.catalogue if product.category == "green tea")
    with pytest.raises(InvalidAction, match="item id"):
        shop.step(f"click[{other.id}]")


def test_an_episode_without_a_purchase_is_truncated_with_nothing(cache_dir: Path) -> None:
    shop = WebShop(WebShopConfig(cache_dir=cache_dir, max_steps=3))
    shop.reset(0)
    outcomes = play(shop, ["search[wool socks]", "click[Back to Search]", "search[wool socks]"])
    assert [outcome.truncated for outcome in outcomes] == [False, False, True]
    assert outcomes[-1].messages == ()
    assert outcomes[-1].reward == 0.0
    assert outcomes[-1].info["success"] == 0.0
    with pytest.raises(EnvError, match="over"):
        shop.step("click[Back to Search]")


def test_a_purchase_at_the_last_step_counts(cache_dir: Path) -> None:
    shop = WebShop(WebShopConfig(cache_dir=cache_dir))
    shop.reset(0)
    actions = shop.solve()
    short = WebShop(WebShopConfig(cache_dir=cache_dir, max_steps=len(actions)))
    short.reset(0)
    last = play(short, actions)[-1]
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)


def test_a_shop_without_a_customer_says_to_reset(shop: WebShop) -> None:
    with pytest.raises(EnvError, match="reset"):
        shop.step("search[green tea]")


@given(
    query=st.one_of(
        st.text(min_size=1), st.sampled_from(['"', "a AND", "NEAR(x y)", "title:shoes", "*", "-", "^", "( OR )", "'; --"])
    )
)
@settings(max_examples=150)
def test_no_query_breaks_the_shop(cache_dir: Path, query: str) -> None:
    shop = WebShop(WebShopConfig(cache_dir=cache_dir))
    shop.reset(0)
    try:
        outcome = shop.step(f"search[{query}]")
    except InvalidAction:
        assert not query.strip()
    else:
        assert text_of(outcome).startswith(("Results", "No results"))


@pytest.mark.parametrize(
    "query", ["shoes " * 2_000, "x" * 10_000, '"' * 10_000, "\ud800\x00", "靴 ботинки", " ".join(map(str, range(3_000)))]
)
def test_huge_and_odd_queries_give_a_short_page(shop: WebShop, query: str) -> None:
    shop.reset(0)
    outcome = shop.step(f"search[{query}]")
    assert len(text_of(outcome)) < 1_500


def test_a_query_without_results_leads_back_to_the_search(shop: WebShop) -> None:
    shop.reset(0)
    assert text_of(shop.step("search[!!!]")).startswith("No results")
    assert admissible(shop) == ["click[Back to Search]"]


def test_pages_are_short(shop: WebShop) -> None:
    for seed in range(60):
        shop.reset(seed)
        results, *items = play(shop, shop.solve()[:-1])
        # About four characters a token: 300 tokens for a list of ten, fewer for an item.
        assert len(text_of(results)) < 1_200
        assert all(len(text_of(item)) < 700 for item in items)


def test_the_line_of_actions_can_be_left_out(cache_dir: Path) -> None:
    shop = WebShop(WebShopConfig(cache_dir=cache_dir, show_actions=False))
    _, user = shop.reset(0)
    assert "Actions" not in user["content"]
    assert "click[" not in text_of(shop.step("search[wool socks]"))


def test_a_demonstration_is_a_whole_conversation(shop: WebShop) -> None:
    conversation = shop.demonstration(5)
    roles = [message["role"] for message in conversation]
    assert roles == ["system", *["user", "assistant"] * ((len(roles) - 1) // 2)]
    assert conversation[-1]["content"] == "<answer>click[Buy Now]</answer>"
    assert shop.demonstration(5, answer="Action: {action}")[-1]["content"] == "Action: click[Buy Now]"


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match="num_products"):
        WebShop(WebShopConfig(num_products=5))
    with pytest.raises(ValueError, match="max_steps"):
        WebShop(WebShopConfig(max_steps=0))
