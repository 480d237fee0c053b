"""Outcome-level estimators against plain loops over samples, and what holds for all estimators."""

import inspect
from dataclasses import replace
from itertools import combinations, product
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from episode_cases import Case, Episode, case_of, random_case

from reroll.algo.advantages import normalised
from reroll.config.advantages import AdvantageConfig, ImportAdvantageConfig
from reroll.config.formula import find_function
from reroll_zoo.algorithms.advantages import gdpo, gpg, opo, pass_at_k, raft, remax

ADVANTAGES = {kind: find_function(AdvantageConfig.group, kind) for kind in AdvantageConfig.kinds() if kind != "import"}

SEEDS = range(8)
EPSILON = 1e-6

MODES = [
    ("group", "group"),  # GRPO, arXiv 2402.03300
    ("group", "none"),  # Dr. GRPO, arXiv 2503.20783
    ("leave_one_out", "none"),  # RLOO, arXiv 2402.14740
    ("group", "batch"),  # Lite PPO, arXiv 2508.08221
    ("group", "batch_centred"),  # REINFORCE++ with baseline, arXiv 2501.03262
    ("batch", "batch"),
    ("running", "running"),
    ("batch", "group"),
    ("leave_one_out", "running"),
    ("running", "batch_centred"),
    ("none", "none"),
    ("none", "batch"),
]


def close(actual: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-9, atol=1e-9)


def sample_std(values: list[float]) -> float:
    if len(values) < 2 or max(values) == min(values):
        return 0.0
    mean = sum(values) / len(values)
    return float((sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5)


def in_stds(centred: float, std: float) -> float:
    return centred / (std + EPSILON) if std else 0.0


@pytest.mark.parametrize(("mean", "std"), MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_normalised_is_reward_minus_mean_over_deviation(mean: Any, std: Any, seed: int) -> None:
    """GRPO and its kin: A_i = (r_i - mean) / std, with each statistic over its own set."""
    case, running_mean, running_std = random_case(seed), 0.3, 1.7
    every = [episode.reward for episode in case.episodes]

    def centred(episode: Episode) -> float:
        siblings = [other.reward for other in case.siblings(episode)]
        if mean == "leave_one_out":
            others = [other.reward for other in case.siblings(episode) if other is not episode]
            return episode.reward - np.mean(others) if others else 0.0
        means = {"none": 0.0, "group": np.mean(siblings), "batch": np.mean(every), "running": running_mean}
        return float(episode.reward - means[mean])

    def advantage(episode: Episode, turn: int, place: int) -> float:
        if std == "none":
            return centred(episode)
        stds = {
            "group": sample_std([other.reward for other in case.siblings(episode)]),
            "batch": sample_std(every),
            "batch_centred": sample_std([centred(other) for other in case.episodes]),
            "running": running_std,
        }
        return in_stds(centred(episode), stds[std])

    flat = case.flat(running_mean=running_mean, running_std=running_std)
    close(normalised(flat, mean=mean, std=std, epsilon=EPSILON), case.expect(advantage))


@pytest.mark.parametrize("seed", SEEDS)
def test_remax_is_reward_minus_the_greedy_answers(seed: int) -> None:
    """ReMax, arXiv 2310.10505, algorithm 1: r(x, y) - r(x, greedy y)."""
    case = random_case(seed)
    close(remax(case.flat()), case.expect(lambda episode, turn, place: episode.reward - episode.baseline))


@pytest.mark.parametrize("seed", SEEDS)
def test_opo_takes_off_the_length_weighted_mean_of_the_group(seed: int) -> None:
    """OPO, arXiv 2505.23585: b = sum(l_i r_i) / sum(l_i)."""
    case = random_case(seed)

    def advantage(episode: Episode, turn: int, place: int) -> float:
        weighted = sum(len(other.tokens) * other.reward for other in case.siblings(episode))
        return episode.reward - weighted / sum(len(other.tokens) for other in case.siblings(episode))

    close(opo(case.flat()), case.expect(advantage))


@pytest.mark.parametrize("seed", SEEDS)
def test_gpg_makes_up_for_groups_whose_rewards_are_all_equal(seed: int) -> None:
    """GPG, arXiv 2504.02546: A = alpha (r - mean), alpha = B / (B - M), M of B samples being in groups without signal."""
    case = random_case(seed)
    silent = [one for one in case.episodes if len({other.reward for other in case.siblings(one)}) == 1]
    alpha = len(case.episodes) / (len(case.episodes) - len(silent))

    def advantage(episode: Episode, turn: int, place: int) -> float:
        return float(alpha * (episode.reward - np.mean([other.reward for other in case.siblings(episode)])))

    assert alpha > 1
    close(gpg(case.flat()), case.expect(advantage))


@pytest.mark.parametrize("weights", [{"form": 0.2, "taste": 1.5}, {"taste": 2.0}, {}])
@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_normalises_every_part_in_its_group_and_the_sum_over_the_batch(weights: dict[str, float], seed: int) -> None:
    """GDPO, arXiv 2601.05242, section 3: A_k per reward and group, their weighted sum, then that over the batch."""
    case = random_case(seed)

    def summed(episode: Episode) -> float:
        total = 0.0
        for name, weight in (weights or {"form": 1.0, "taste": 1.0}).items():
            of_group = [other.parts[name] for other in case.siblings(episode)]
            total += weight * in_stds(episode.parts[name] - np.mean(of_group), sample_std(of_group))
        return float(total)

    sums = [summed(episode) for episode in case.episodes]
    expected = case.expect(lambda episode, turn, place: in_stds(summed(episode) - np.mean(sums), sample_std(sums)))
    close(gdpo(case.flat(), weights=weights, epsilon=EPSILON), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_weighs_parts_as_each_episodes_reward_does_unless_it_is_told_weights(seed: int) -> None:
    """Domains may weigh a part of the same name differently: the weight is that of the episode."""
    case = random_case(seed)
    flat = case.flat()
    of_group = torch.tensor(np.random.default_rng(seed).normal(size=flat.num_groups))
    weighed = replace(flat, part_weights={"form": of_group[flat.group]})

    def summed(episode: Episode) -> float:
        form, taste = ([other.parts[name] for other in case.siblings(episode)] for name in ("form", "taste"))
        first = in_stds(episode.parts["form"] - np.mean(form), sample_std(form))
        return float(of_group[episode.group] * first + in_stds(episode.parts["taste"] - np.mean(taste), sample_std(taste)))

    sums = [summed(episode) for episode in case.episodes]
    expected = case.expect(lambda episode, turn, place: in_stds(summed(episode) - np.mean(sums), sample_std(sums)))
    close(gdpo(weighed, weights={}, epsilon=EPSILON), expected)
    told = {"form": 0.2, "taste": 1.5, "of a domain without a group in this step": 3.0}
    assert gdpo(weighed, weights=told, epsilon=EPSILON).equal(gdpo(flat, weights=told, epsilon=EPSILON))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_pass_at_k_is_what_all_sets_of_k_siblings_say(k: int, seed: int) -> None:
    """Pass@k training, arXiv 2508.10751, section 2: here by listing the sets that their closed form counts."""
    case = random_case(seed)

    def advantage(episode: Episode, turn: int, place: int) -> float:
        siblings = case.siblings(episode)
        if len(siblings) <= k:
            return 0.0
        sets = list(combinations(siblings, k))
        passed = [any(one.gross >= 0.5 for one in members) for members in sets]
        mine = [ok for ok, members in zip(passed, sets, strict=True) if any(one is episode for one in members)]
        return float((np.mean(mine) - np.mean(passed)) / np.std(passed)) if np.std(passed) else 0.0

    close(pass_at_k(case.flat(), k=k, threshold=0.5), case.expect(advantage))


@pytest.mark.parametrize("seed", SEEDS)
def test_raft_accepts_what_reached_the_threshold(seed: int) -> None:
    """RAFT as in arXiv 2504.11343, section 2: keep the samples whose reward says right."""
    case = random_case(seed)
    expected = case.expect(lambda episode, turn, place: float(episode.gross >= 0.5))
    close(raft(case.flat(), accept="threshold", threshold=0.5), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_raft_accepts_the_first_of_the_best_of_each_group(seed: int) -> None:
    """RAFT, arXiv 2304.06767, algorithm 1: the sample with the highest reward of each prompt."""
    case = random_case(seed, penalised=False)

    def advantage(episode: Episode, turn: int, place: int) -> float:
        best = max(case.siblings(episode), key=lambda other: other.reward)  # max keeps the first of equals
        return float(episode is best)

    close(raft(case.flat(), accept="best", threshold=0.0), case.expect(advantage))


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_is_dr_grpo_times_n_over_n_minus_one(seed: int) -> None:
    case = random_case(seed)
    flat = case.flat()
    size = torch.bincount(flat.group).double()[flat.group]
    rloo = normalised(flat, mean="leave_one_out", std="none", epsilon=EPSILON)
    dr_grpo = normalised(flat, mean="group", std="none", epsilon=EPSILON)
    torch.testing.assert_close(rloo, dr_grpo * flat.spread(size / (size - 1).clamp(min=1)))


def test_dr_grpo_is_grpo_where_the_deviation_is_one() -> None:
    flat = case_of([1.0, 2.0, 3.0], [-4.0, -5.0, -6.0]).flat()
    grpo = normalised(flat, mean="group", std="group", epsilon=1e-12)
    torch.testing.assert_close(grpo, normalised(flat, mean="group", std="none", epsilon=EPSILON))


def test_gdpo_of_one_part_is_grpo_up_to_the_batch_normalisation() -> None:
    flat = random_case(3, penalised=False).flat()
    flat = replace(flat, parts={"all": flat.reward})
    gdpo_advantage = gdpo(flat, weights={"all": 0.3}, epsilon=1e-12)
    grpo = normalised(flat, mean="group", std="group", epsilon=1e-12)
    scale = (gdpo_advantage / grpo)[grpo.abs() > 1e-3]
    assert len(scale) > 5
    torch.testing.assert_close(scale, scale[:1].expand_as(scale))


def test_the_penalty_does_not_make_a_right_answer_wrong() -> None:
    case = case_of([1.0, 0.0, 0.0])
    case.episodes[0].turns[0].tokens[0].penalty = 0.9
    flat = case.flat()
    assert flat.reward[0] == pytest.approx(0.1)
    assert raft(flat, accept="threshold", threshold=0.5).tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0]
    assert pass_at_k(flat, k=1, threshold=0.5)[1] > 0


OPTIONS: dict[str, dict[str, Any]] = {
    "normalised": {"mean": "group", "std": "group", "epsilon": EPSILON},
    "remax": {},
    "opo": {},
    "gpg": {},
    "gdpo": {"weights": {}, "epsilon": EPSILON},
    "pass_at_k": {"k": 2, "threshold": 0.5},
    "raft": {"accept": "best", "threshold": 0.5},
    "returns": {"discount": 0.9, "whiten": True},
    "gae": {"discount": 0.9, "gae_lambda": 0.8},
    "optimal_token_baseline": {"tail": "return"},
    "turn_returns": {"discount": 0.9, "mean": "group", "std": "group", "epsilon": EPSILON},
    "gigpo": {"discount": 0.9, "turn_weight": 1.0, "std": "group", "epsilon": EPSILON},
}

BASELINED = ["normalised", "opo", "gpg", "gdpo", "pass_at_k", "turn_returns", "gigpo"]
"""Those that only compare siblings."""


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_tokens_nobody_wrote_get_exactly_zero(kind: str) -> None:
    for seed in SEEDS:
        flat = random_case(seed).flat()
        advantage = ADVANTAGES[kind](flat, **OPTIONS[kind])
        assert advantage.shape == flat.token_turn.shape
        assert advantage.isfinite().all()
        assert not advantage[flat.token_turn < 0].any()


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_an_empty_batch_gives_no_advantages(kind: str) -> None:
    flat = replace(Case([], []).flat(), parts={"all": torch.zeros(0, dtype=torch.float64)})
    assert ADVANTAGES[kind](flat, **OPTIONS[kind]).shape == (0,)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_a_batch_in_which_nobody_wrote_gives_zeros(kind: str) -> None:
    unwritten = [Episode(0, [], unwritten_reward=reward, parts={"all": reward}) for reward in (0.0, 1.0)]
    flat = Case(unwritten, [None, None, None]).flat()
    assert ADVANTAGES[kind](flat, **OPTIONS[kind]).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_single_precision_stays_single(kind: str) -> None:
    flat = random_case(0).flat()
    single = {name: value.float() for name, value in vars(flat).items() if getattr(value, "dtype", None) == torch.float64}
    flat = replace(flat, **single, parts={name: part.float() for name, part in flat.parts.items()})
    advantage = ADVANTAGES[kind](flat, **OPTIONS[kind])
    assert advantage.dtype == torch.float32
    double = ADVANTAGES[kind](random_case(0).flat(), **OPTIONS[kind])
    torch.testing.assert_close(advantage.double(), double, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", BASELINED)
@pytest.mark.parametrize("groups", [([0.7],), ([0.1] * 3,), ([0.0] * 8, [1 / 3] * 7), ([5.0], [0.1] * 9)])
def test_groups_of_one_and_of_equal_rewards_give_exact_zeros(kind: str, groups: tuple[list[float], ...]) -> None:
    flat = case_of(*groups).flat()
    flat = replace(flat, reward=flat.reward.float(), turn_reward=flat.turn_reward.float(), parts={"all": flat.reward.float()})
    assert not ADVANTAGES[kind](flat, **OPTIONS[kind]).any()


@pytest.mark.parametrize(("mean", "std"), [("none", "batch"), ("batch", "group"), ("running", "running"), ("none", "group")])
def test_a_deviation_of_zero_gives_zeros_and_no_huge_numbers(mean: Any, std: Any) -> None:
    flat = case_of([1.0, 1.0], [1.0, 1.0]).flat(running_mean=0.2)
    assert not normalised(flat, mean=mean, std=std, epsilon=EPSILON).any()


def test_gpg_of_silent_groups_only_is_zero() -> None:
    assert not gpg(case_of([1.0, 1.0], [0.0, 0.0]).flat()).any()


def test_missing_inputs_are_named() -> None:
    flat = replace(random_case(0).flat(), baseline=None, value=None, score_norm=None)
    for kind, fix in [("remax", "greedy"), ("gae", "critic"), ("optimal_token_baseline", "score norms")]:
        with pytest.raises(ValueError, match=fix):
            ADVANTAGES[kind](flat, **OPTIONS[kind])
    with pytest.raises(ValueError, match=r"style, which is no part of the reward: name some of form, taste"):
        gdpo(flat, weights={"style": 1.0}, epsilon=EPSILON)
    with pytest.raises(ValueError, match="named parts"):
        gdpo(replace(flat, parts={}), weights={}, epsilon=EPSILON)


def test_every_configured_advantage_has_a_function_that_takes_its_options() -> None:
    nodes = AdvantageConfig.kinds()
    assert nodes.pop("import") is ImportAdvantageConfig
    assert nodes.keys() == ADVANTAGES.keys() == OPTIONS.keys()
    for kind, node in nodes.items():
        options = get_type_hints(ADVANTAGES[kind])
        del options["episodes"], options["return"]
        assert {name: field.annotation for name, field in node.model_fields.items() if name != "kind"} == options
        assert all(
            parameter.default is inspect.Parameter.empty
            for parameter in inspect.signature(ADVANTAGES[kind]).parameters.values()
        )
        defaults = node(kind=kind).model_dump(exclude={"kind"})
        assert ADVANTAGES[kind](random_case(0).flat(), **defaults).isfinite().all()


def _ways(kind: str) -> list[AdvantageConfig]:
    """Nodes of this kind with every combination of what they are normalised over."""
    node = AdvantageConfig.kinds()[kind]
    choices = {
        name: get_args(field.annotation) for name, field in node.model_fields.items() if name in ("mean", "std", "accept")
    }
    choices |= {name: (False, True) for name in ("whiten",) if name in node.model_fields}
    return [node(kind=kind, **dict(zip(choices, values, strict=True))) for values in product(*choices.values())]


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_whether_a_groups_advantages_depend_on_other_groups_is_as_declared(kind: str) -> None:
    """Each group alone against all together: what `train.stream` relies on."""
    for node in _ways(kind):
        alone_is_same = True
        for seed in SEEDS:
            case = random_case(seed, all_written=True)
            together = ADVANTAGES[kind](case.flat(running_mean=0.3, running_std=1.7), **node.arguments)
            for group in {episode.group for episode in case.episodes}:
                members = [place for place, episode in enumerate(case.episodes) if episode.group == group]
                at = [index for index, where in enumerate(case.layout) if where is not None and where[0] in members]
                layout = [(members.index(where[0]), *where[1:]) for where in case.layout if where and where[0] in members]
                episodes = [replace(case.episodes[place], group=0) for place in members]
                own = ADVANTAGES[kind](Case(episodes, layout).flat(running_mean=0.3, running_std=1.7), **node.arguments)
                alone_is_same &= bool(torch.allclose(own, together[at], rtol=1e-9, atol=1e-9))
        uses_running = "running" in node.arguments.values()  # It is that of the steps so far, this one included.
        assert node.group_by_group == (alone_is_same and not uses_running), node
