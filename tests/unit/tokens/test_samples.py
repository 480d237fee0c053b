from dataclasses import replace

import numpy as np

from reroll.tokens.batch import pack
from reroll.tokens.samples import rows_of, sft_sample
from reroll.types import Completion, FinishReason, Group, Message, Prompt, Sample, Status, Trajectory, Turn


def turn(prompt_ids: list[int], written: list[int], *, reward: float = 0.0, reply: str = "") -> Turn:
    completion = Completion(
        token_ids=tuple(written),
        logprobs=tuple(-float(token) for token in written),
        finish_reason=FinishReason.STOP,
        versions=((0, len(written)),),
    )
    messages = (Message(role="user", content=reply),) if reply else ()
    return Turn(prompt_ids=tuple(prompt_ids), completion=completion, text="", reward=reward, reply=messages)


def group(*trajectories: list[Turn], rewards: tuple[float, ...] = (), baseline: float | None = None) -> Group:
    rewards = rewards or tuple(sum(turn.reward for turn in turns) for turns in trajectories)
    return Group(
        number=7,
        prompt=Prompt(id="p", messages=(), domain="d"),
        trajectories=tuple(
            Trajectory(
                id=str(index),
                turns=tuple(turns),
                status=Status.COMPLETED,
                reward=rewards[index],
                reward_parts={"whole": rewards[index], "second": 1.0} if index else {"whole": rewards[index]},
            )
            for index, turns in enumerate(trajectories)
        ),
        version=0,
        baseline=baseline,
    )


def rows(*trajectories: list[Turn]) -> list[Sample]:
    return rows_of([group(*trajectories)]).samples


def test_a_single_turn_is_prompt_and_completion_with_the_loss_on_the_completion() -> None:
    (sample,) = rows([turn([1, 2, 3], [4, 5])])
    assert sample.ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.loss_mask.tolist() == [False, False, False, True, True]
    assert sample.logp.tolist() == [0, 0, 0, -4, -5]
    assert sample.turn.tolist() == [-1, -1, -1, 0, 0]
    assert (sample.ids.dtype, sample.loss_mask.dtype, sample.logp.dtype, sample.turn.dtype) == (
        np.int64, np.bool_, np.float32, np.int64,
    )  # fmt: skip


def test_later_turns_that_extend_the_tokens_continue_the_row_without_loss_on_the_reply() -> None:
    (sample,) = rows([turn([1, 2], [3]), turn([1, 2, 3, 8, 9], [4, 5])])
    assert sample.ids.tolist() == [1, 2, 3, 8, 9, 4, 5]
    assert sample.turn.tolist() == [-1, -1, 0, -1, -1, 1, 1]
    assert sample.logp.tolist() == [0, 0, -3, 0, 0, -4, -5]


def test_a_turn_whose_history_was_edited_starts_a_further_row() -> None:
    first, second = rows([turn([1, 2], [3, 4]), turn([1, 2, 9], [5])])
    assert (first.ids.tolist(), second.ids.tolist()) == ([1, 2, 3, 4], [1, 2, 9, 5])
    assert second.turn.tolist() == [-1, -1, -1, 1]


def test_a_trajectory_that_wrote_nothing_gives_no_row_but_counts_as_an_episode() -> None:
    samples, episodes = rows_of([group([turn([1], [])], [turn([1], [3])], rewards=(0.25, 1.0))])
    assert [sample.ids.tolist() for sample in samples] == [[1, 3]]
    assert episodes.reward.tolist() == [0.25, 1.0]
    assert episodes.turn_episode.tolist() == [1]


def test_the_first_token_is_never_in_the_loss() -> None:
    (sample,) = rows([turn([], [3, 4])])
    assert (sample.loss_mask.tolist(), sample.logp.tolist(), sample.turn.tolist()) == ([False, True], [0, -4], [-1, 0])


def test_token_t_of_the_episodes_is_token_t_of_the_packed_rows() -> None:
    groups = [
        group([turn([1, 2], [3]), turn([1, 2, 3, 8], [4, 5]), turn([9], [6])], [turn([1, 2], [7])]),
        group([turn([5], [6, 7])]),
    ]
    samples, episodes = rows_of(groups)
    batch = pack(samples)
    assert ((episodes.token_turn >= 0) == batch.loss_mask).all()
    assert episodes.token_turn[batch.loss_mask].tolist() == [0, 1, 1, 2, 3, 4, 4]
    assert episodes.turn_episode.tolist() == [0, 0, 0, 1, 2]
    assert episodes.group.tolist() == [0, 0, 1]


def test_turn_rewards_sum_to_the_reward_and_the_outcome_is_counted_to_the_last_turn() -> None:
    played = [turn([1], [2], reward=0.5), turn([1, 2], [3], reward=0.25)]
    _, episodes = rows_of([group(played, rewards=(2.0,))])
    assert episodes.turn_reward.tolist() == [0.5, 1.5]


def test_the_reward_of_an_empty_turn_goes_to_the_written_turn_before_it_or_to_the_first() -> None:
    played = [turn([1], [], reward=8.0), turn([1], [2], reward=1.0), turn([1, 2], [], reward=4.0), turn([1, 2], [3])]
    _, episodes = rows_of([group(played)])
    assert episodes.turn_reward.tolist() == [13.0, 0.0]


def test_turns_of_one_group_that_were_shown_the_same_have_the_same_state() -> None:
    ways = [
        [turn([1], [2], reply="left"), turn([1, 2, 3], [4])],
        [turn([1], [3], reply="right"), turn([1, 3, 3], [4], reply="left"), turn([1, 3, 3, 4, 3], [5])],
    ]
    _, episodes = rows_of([group(*ways), group(*ways)])
    assert episodes.turn_state.tolist() == [0, 1, 0, 2, 1, 3, 4, 3, 5, 4]


def test_a_state_that_the_environment_names_counts_instead_of_what_it_showed() -> None:
    ways = [[turn([1], [2], reply="a"), replace(turn([1, 2, 3], [4]), state="x")] for _ in range(2)]
    ways[1][0] = replace(ways[1][0], reply=())
    _, episodes = rows_of([group(*ways)])
    assert episodes.turn_state.tolist() == [0, 1, 0, 1]


def test_named_parts_and_the_greedy_baseline_arrive_per_episode() -> None:
    one = group([turn([1], [2])], [turn([1], [3])], rewards=(0.5, 1.0), baseline=0.75)
    _, episodes = rows_of([one])
    assert {name: part.tolist() for name, part in episodes.parts.items()} == {"second": [0.0, 1.0], "whole": [0.5, 1.0]}
    assert episodes.baseline is not None
    assert episodes.baseline.tolist() == [0.75, 0.75]
    assert rows_of([one, group([turn([1], [2])])]).episodes.baseline is None


def test_an_sft_row_has_its_loss_where_the_mask_says_and_advantage_one_there() -> None:
    sample = sft_sample([1, 2, 3], [False, True, False])
    assert sample.loss_mask.tolist() == [False, True, False]
    assert pack([sample]).advantage.tolist() == [0, 1, 0]
