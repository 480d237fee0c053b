import numpy as np
import pytest

from reroll.tokens.samples import samples_of, sft_sample
from reroll.types import Completion, FinishReason, Group, Prompt, Status, Trajectory, Turn


def turn(prompt_ids: list[int], written: list[int]) -> Turn:
    completion = Completion(
        token_ids=tuple(written),
        logprobs=tuple(-float(token) for token in written),
        finish_reason=FinishReason.STOP,
        versions=((0, len(written)),),
    )
    return Turn(prompt_ids=tuple(prompt_ids), completion=completion, text="")


def group(*trajectories: list[Turn]) -> Group:
    return Group(
        ticket=7,
        prompt=Prompt(id="p", messages=(), domain="d"),
        trajectories=tuple(
            Trajectory(id=str(index), turns=tuple(turns), status=Status.COMPLETED) for index, turns in enumerate(trajectories)
        ),
        version=0,
    )


def test_a_single_turn_is_prompt_and_completion_with_the_loss_on_the_completion() -> None:
    (sample,) = samples_of(group([turn([1, 2, 3], [4, 5])]), [0.5])
    assert sample.ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.loss_mask.tolist() == [False, False, False, True, True]
    assert sample.logp.tolist() == [0, 0, 0, -4, -5]
    assert sample.advantage.tolist() == [0, 0, 0, 0.5, 0.5]
    assert (sample.ids.dtype, sample.loss_mask.dtype, sample.logp.dtype, sample.advantage.dtype) == (
        np.int64, np.bool_, np.float32, np.float32,
    )  # fmt: skip


def test_later_turns_that_extend_the_tokens_continue_the_row_without_loss_on_the_reply() -> None:
    (sample,) = samples_of(group([turn([1, 2], [3]), turn([1, 2, 3, 8, 9], [4, 5])]), [1.0])
    assert sample.ids.tolist() == [1, 2, 3, 8, 9, 4, 5]
    assert sample.loss_mask.tolist() == [False, False, True, False, False, True, True]
    assert sample.logp.tolist() == [0, 0, -3, 0, 0, -4, -5]


def test_a_turn_whose_history_was_edited_starts_a_further_row() -> None:
    first, second = samples_of(group([turn([1, 2], [3, 4]), turn([1, 2, 9], [5])]), [2.0])
    assert (first.ids.tolist(), second.ids.tolist()) == ([1, 2, 3, 4], [1, 2, 9, 5])
    assert second.loss_mask.tolist() == [False, False, False, True]
    assert second.advantage.tolist() == [0, 0, 0, 2]


def test_siblings_get_their_own_advantages_in_order() -> None:
    samples = samples_of(group([turn([1], [2])], [turn([1], [3])]), [1.0, -1.0])
    assert [(sample.ids[-1], sample.advantage[-1]) for sample in samples] == [(2, 1.0), (3, -1.0)]


def test_a_trajectory_that_wrote_nothing_gives_no_row() -> None:
    assert [sample.ids.tolist() for sample in samples_of(group([turn([1], [])], [turn([1], [3])]), [0.0, 1.0])] == [[1, 3]]


def test_the_first_token_is_never_in_the_loss() -> None:
    (sample,) = samples_of(group([turn([], [3, 4])]), [1.0])
    assert (sample.loss_mask.tolist(), sample.logp.tolist(), sample.advantage.tolist()) == ([False, True], [0, -4], [0, 1])


def test_a_missing_advantage_is_an_error() -> None:
    with pytest.raises(ValueError, match="got 1 for 2 trajectories"):
        samples_of(group([turn([1], [2])], [turn([1], [3])]), [1.0])


def test_an_sft_row_has_advantage_one_on_its_loss_tokens() -> None:
    sample = sft_sample([1, 2, 3], [False, True, False])
    assert (sample.advantage.tolist(), sample.loss_mask.tolist()) == ([0, 1, 0], [False, True, False])
