"""GSPO with one ratio a turn, against a loop over turns."""

import numpy as np
import pytest
import torch
from loss_cases import LENGTHS, LOSSES, Arrays, ragged, tokens

from reroll.algo.losses import Tokens

CLIP = {"clip_low": 0.03, "clip_high": 0.05}


def by_turn(seed: int) -> Arrays:
    """Turns of a few tokens, numbered from 0 in every sequence; masks have gaps, and one turn has nothing in the loss."""
    arrays = ragged(seed)
    position = np.concatenate([np.arange(length) for length in LENGTHS])
    turn = position // 3
    arrays["mask"] &= ~((arrays["sequence"] == 5) & (turn == 1))
    return arrays | {"turn": np.where(arrays["mask"], turn, -1)}


def reference(arrays: Arrays, logp: np.ndarray) -> np.ndarray:
    """-min(s * A, clip(s) * A), s the geometric mean of the ratios of the turn's tokens in the loss. [T], 0 off the mask."""
    loss = np.zeros(len(logp))
    units = {(s, t) for s, t, m in zip(arrays["sequence"], arrays["turn"], arrays["mask"], strict=True) if m}
    for sequence, turn in units:
        places = np.flatnonzero(arrays["mask"] & (arrays["sequence"] == sequence) & (arrays["turn"] == turn))
        ratio = np.prod(np.exp((logp - arrays["old_logp"])[places])) ** (1 / len(places))
        for place in places:
            a = arrays["advantage"][place]
            loss[place] = -min(ratio * a, min(max(ratio, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"]) * a)
    return loss


@pytest.mark.parametrize("seed", range(3))
def test_gspo_by_turn_clips_the_geometric_mean_of_each_turns_ratios(seed: int) -> None:
    arrays = by_turn(seed)
    t, leaf = tokens(arrays)
    loss = torch.where(t.mask, LOSSES["gspo"](t, **CLIP, level="turn"), 0.0)
    np.testing.assert_allclose(loss.detach().numpy(), reference(arrays, arrays["logp"]), rtol=1e-12)
    gradient = torch.autograd.grad(loss.sum(), leaf)[0].numpy()
    for place in range(len(arrays["logp"])):
        step = np.zeros(len(arrays["logp"]))
        step[place] = 1e-6
        slope = (reference(arrays, arrays["logp"] + step) - reference(arrays, arrays["logp"] - step)).sum() / 2e-6
        assert gradient[place] == pytest.approx(slope, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_gspo_token_by_turn_has_the_same_value_and_moves_each_token_by_its_own_advantage(seed: int) -> None:
    arrays = by_turn(seed)
    t, leaf = tokens(arrays)
    loss = torch.where(t.mask, LOSSES["gspo_token"](t, **CLIP, level="turn"), 0.0)
    expected = reference(arrays, arrays["logp"])
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-12)
    gradient = torch.autograd.grad(loss.sum(), leaf)[0].numpy()
    moves = gradient != 0
    np.testing.assert_allclose(gradient[moves], expected[moves], rtol=1e-9)  # d/dlogp of -s * A * p / sg[p]: itself.
    assert moves.any()
    assert not moves[arrays["mask"]].all()


def test_with_one_turn_a_sequence_it_is_gspo() -> None:
    arrays = ragged(4)
    one_turn = arrays | {"turn": np.where(arrays["mask"], 3, -1)}
    for kind in ("gspo", "gspo_token"):
        results = []
        for level in ("turn", "sequence"):
            t, leaf = tokens(one_turn)
            loss = torch.where(t.mask, LOSSES[kind](t, **CLIP, level=level), 0.0)
            results.append((loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]))
        torch.testing.assert_close(results[0], results[1])


def test_a_ratio_of_turns_says_when_turns_are_not_known() -> None:
    t: Tokens = tokens(ragged(0))[0]
    with pytest.raises(ValueError, match=r"Tokens\.turn"):
        LOSSES["gspo"](t, **CLIP, level="turn")
