import pickle

import numpy as np
import pytest
import torch

from reroll.algo.kl import KL_ESTIMATORS
from reroll.algo.losses import Tokens
from reroll.tokens.batch import Batch, pack
from reroll.training.base import Predictions, Weighting
from reroll.training.loss import SFT_LOSS, PolicyLoss, ValueLoss
from reroll.types import Sample

PPO = PolicyLoss(kind="ppo", options={"clip_low": 0.2, "clip_high": 0.3})


def batch(advantage: float = 1.0) -> Batch:
    """Two rows of four tokens; the last two of each are in the loss, sampled at log-prob -1."""
    mask = np.array([False, False, True, True])
    row = Sample(
        ids=np.arange(4),
        loss_mask=mask,
        logp=np.where(mask, -1, 0).astype(np.float32),
        turn=np.where(mask, 0, -1),
    )
    packed = pack([row, row])
    return packed.replace(advantage=packed.advantage * advantage)


def logp_of(value: float) -> torch.Tensor:
    return torch.where(batch().loss_mask, value, 0.0).requires_grad_()


def said(logp: torch.Tensor) -> Predictions:
    return Predictions(logp=logp if logp.requires_grad else logp.requires_grad_())


def test_it_travels() -> None:
    loss = PolicyLoss(
        kind="ppo",
        options={"clip_low": 0.1, "clip_high": 0.2},
        corrections=(Weighting(kind="importance", options={"level": "token"}),),
    )
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_that_of_the_policy() -> None:
    logp = logp_of(-2.0)
    output = PPO(batch(advantage=3.0), said(logp))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-3.0)
    assert output.stats["ratio"].value == 1.0
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0, 0, -0.75, -0.75] * 2)


def test_the_report_says_how_far_the_policy_is_from_the_old_one_and_from_the_sampler() -> None:
    packed = batch().replace(old_logp=logp_of(-2.0).detach())
    values = PPO(packed, said(logp_of(-1.5))).stats.values_by_name()
    ratio = np.exp(0.5)
    assert values["ratio"] == values["ratio_max"] == pytest.approx(ratio)
    assert values["kl_old"] == pytest.approx(ratio - 1 - 0.5, abs=1e-6)
    assert values["sampler_gap"] == values["sampler_gap_max"] == pytest.approx(0.5)
    assert values["entropy"] == pytest.approx(1.5)
    assert values["clip_fraction"] == 1.0
    assert values["loss"] == pytest.approx(-1.3)


def test_the_report_of_a_token_that_became_endlessly_likelier_is_still_a_number() -> None:
    packed = batch().replace(old_logp=logp_of(-500.0).detach())
    values = PPO(packed, said(logp_of(-1.5))).stats.values_by_name()
    assert np.isfinite(list(values.values())).all()
    assert values["ratio_max"] == pytest.approx(np.exp(20), rel=1e-5)


def test_only_tokens_that_clipping_holds_back_count_as_clipped() -> None:
    packed = batch(advantage=-1.0).replace(old_logp=logp_of(-2.0).detach())
    assert PPO(packed, said(logp_of(-1.5))).stats["clip_fraction"].value == 0.0
    assert PPO(packed, said(logp_of(-2.5))).stats["clip_fraction"].value == 1.0


def test_a_kl_penalty_adds_its_share_and_reports_it() -> None:
    loss = PolicyLoss(kind="reinforce", kl_coef=0.5, kl_estimator="k1")
    packed = batch(advantage=0.0).replace(ref_logp=logp_of(-3.0).detach())
    output = loss(packed, said(logp_of(-2.0)))
    assert output.loss.item() == pytest.approx(0.5)
    assert output.stats["kl_ref"].value == pytest.approx(1.0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_times_its_ratio_a_kl_has_the_gradient_of_the_true_one_however_far_the_policy_moved(estimator: str) -> None:
    """Tokens of every kind as often as the old policy draws them: their mean gradient in the logits, against autograd's."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    old, reference = (torch.tensor(p, dtype=torch.float64) for p in ([0.1, 0.5, 0.15, 0.25], [0.4, 0.3, 0.2, 0.1]))
    policy = logits.log_softmax(0)
    true = torch.autograd.grad((policy.exp() * (policy - reference.log())).sum(), logits, retain_graph=True)[0]
    row = Sample(ids=np.arange(5), loss_mask=np.arange(5) > 0, logp=np.zeros(5, dtype=np.float32), turn=np.arange(5) - 1)
    one = pack([row])

    def gradient(**options: bool) -> torch.Tensor:
        total = torch.zeros(4, dtype=torch.float64)
        loss = PolicyLoss(kind="reinforce", kl_coef=1.0, kl_estimator=estimator, **options)
        for token in range(4):
            place = torch.arange(5) == token + 1
            packed = one.replace(
                loss_mask=place,
                advantage=torch.zeros(5),
                old_logp=torch.cat([torch.zeros(1), old.log()]),
                ref_logp=torch.cat([torch.zeros(1), reference.log()]),
                num_loss_tokens=1,
            )
            said = Predictions(logp=torch.cat([torch.zeros(1), policy]))
            total += old[token] * torch.autograd.grad(loss(packed, said).loss, logits, retain_graph=True)[0]
        return total

    torch.testing.assert_close(gradient(kl_times_ratio=True), true)
    assert not torch.allclose(gradient(), true, atol=0.05)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("times_ratio", [True, False])
def test_what_lies_off_the_mask_leaks_into_no_gradient_of_a_kl(estimator: str, times_ratio: bool) -> None:
    mask = batch().loss_mask
    logp = torch.where(mask, -2.0, torch.nan).requires_grad_()
    nan = torch.where(mask, -1.5, torch.nan)
    loss = PolicyLoss(kind="ppo", options=PPO.options, kl_coef=0.5, kl_estimator=estimator, kl_times_ratio=times_ratio)
    output = loss(batch().replace(ref_logp=nan, old_logp=nan), Predictions(logp=logp))
    output.loss.backward()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()
    assert not logp.grad[~mask].any()


def test_what_lies_off_the_mask_leaks_into_no_gradient_of_a_critic() -> None:
    mask = batch().loss_mask
    value = torch.where(mask, 1.0, torch.nan).requires_grad_()
    nan = torch.where(mask, 2.0, torch.nan)
    ValueLoss(clip=0.2)(batch().replace(value=nan, returns=nan), Predictions(value=value)).loss.backward()
    assert value.grad is not None
    assert value.grad.isfinite().all()


def test_a_kl_penalty_without_reference_logprobs_is_an_error() -> None:
    with pytest.raises(ValueError, match="no ref_logp"):
        PolicyLoss(kind="reinforce", kl_coef=0.5)(batch(), said(logp_of(-1.0)))


def test_the_sft_loss_is_the_mean_cross_entropy_of_the_masked_tokens() -> None:
    assert SFT_LOSS(batch(), said(logp_of(-0.7))).loss.item() == pytest.approx(0.7)


def test_stats_of_micro_batches_merge_to_those_of_the_batch() -> None:
    packed, logp = batch(), torch.where(batch().loss_mask, -torch.arange(8.0), 0.0)
    whole = PPO(packed.replace(old_logp=logp - 0.1), said(logp.clone())).stats
    parts = [
        PPO(packed.replace(old_logp=logp - 0.1).select([index]), said(logp[4 * index : 4 * index + 4])).stats
        for index in range(2)
    ]
    merged = (parts[0] + parts[1]).values_by_name()
    assert merged == pytest.approx(whole.values_by_name())


def test_a_micro_batch_without_loss_tokens_reports_nothing_but_a_zero_loss() -> None:
    packed = batch().replace(loss_mask=torch.zeros(8, dtype=torch.bool))
    output = SFT_LOSS(packed, said(torch.zeros(8)))
    assert output.stats.values_by_name() == {"loss": 0.0}


def test_corrections_weigh_the_loss_and_report_how_much() -> None:
    """The trainer starts at -2, the sampler drew at -1: every token weighs exp(-1), or nothing below a bound of 0.5."""
    packed = batch().replace(old_logp=logp_of(-2.0).detach())
    plain = PPO(packed, said(logp_of(-2.0))).loss.item()
    truncate = {"level": "token", "mode": "truncate", "low": 0.5, "high": 2.0}
    weighed = PolicyLoss(kind="ppo", options=PPO.options, corrections=(Weighting(kind="importance", options=truncate),))(
        packed, said(logp_of(-2.0))
    )
    assert weighed.loss.item() == pytest.approx(plain * np.exp(-1))
    assert weighed.stats["correction_token_truncate_weight"].value == pytest.approx(np.exp(-1))
    both = PolicyLoss(
        kind="ppo",
        options=PPO.options,
        corrections=tuple(Weighting(kind="importance", options=truncate | {"mode": mode}) for mode in ("truncate", "mask")),
    )
    output = both(packed, said(logp_of(-2.0)))
    assert output.loss.item() == 0
    assert output.stats["correction_token_mask_bounded"].value == 1


def test_a_rejection_takes_a_sequence_out_of_the_policys_term_and_leaves_it_in_denominator_and_kl() -> None:
    """The sampler drew at -1. The first row is still near it, the second is not."""
    logp = torch.where(batch().loss_mask, torch.tensor([-1.1] * 4 + [-3.0] * 4), 0.0).requires_grad_()
    far = {"distance": "k1", "level": "sequence", "take": "mean", "high": 0.5, "only_negative": True}
    loss = PolicyLoss(kind="reinforce", rejections=(Weighting(kind="distance", options=far),), kl_coef=0.5, kl_estimator="k2")
    packed = batch(advantage=-1.0).replace(ref_logp=logp.detach())
    output = loss(packed, Predictions(logp=logp))
    output.loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0, 0, 0.25, 0.25, 0, 0, 0, 0])  # A quarter still: all four count.
    values = output.stats.values_by_name()
    assert values["rejection_sequence_mean_k1_distance"] == pytest.approx((0.1 + 2.0) / 2)
    assert values["rejection_sequence_mean_k1_rejected"] == pytest.approx(0.5)
    good = loss(batch(advantage=1.0).replace(ref_logp=logp.detach()), Predictions(logp=logp))
    assert good.stats["rejection_sequence_mean_k1_rejected"].value == 0


def surest_tokens_stand_still(t: Tokens, *, least: float) -> torch.Tensor:
    """A loss of one's own that reads all that a loss may see."""
    assert t.entropy is not None
    assert t.turn is not None
    assert t.sampler_logp is not None
    is_open = (t.entropy.detach() > least) & (t.turn >= 0) & (t.sampler_logp < 0)
    return torch.where(is_open, -t.advantage * t.logp, 0.0) - 0.1 * t.entropy


def test_a_loss_of_ones_own_sees_entropy_turn_and_sampler_and_asks_the_model_only_for_what_it_names() -> None:
    path = f"{__name__}:surest_tokens_stand_still"
    loss = PolicyLoss(kind=path, options={"least": 1.0}, sees_entropy=True)
    assert loss.needs.entropy
    assert not PPO.needs.entropy
    entropy = torch.tensor([9.0, 9.0, 2.0, 0.5, 9.0, 9.0, 2.0, 0.5], requires_grad=True)
    logp = logp_of(-0.7)
    loss(batch(), Predictions(logp=logp, entropy=entropy)).loss.backward()
    assert logp.grad is not None
    assert entropy.grad is not None
    assert logp.grad.tolist() == pytest.approx([0, 0, -0.25, 0, 0, 0, -0.25, 0])
    assert entropy.grad.tolist() == pytest.approx([0, 0, -0.025, -0.025] * 2)


def entropy_alone(t: Tokens) -> torch.Tensor:
    assert t.entropy is not None
    return -t.entropy


def test_a_loss_of_ones_own_may_be_made_of_the_entropy_alone() -> None:
    entropy = torch.full((8,), 2.0, requires_grad=True)
    output = PolicyLoss(kind=f"{__name__}:entropy_alone", sees_entropy=True)(
        batch(), Predictions(logp=logp_of(-1.0), entropy=entropy)
    )
    assert output.loss.item() == pytest.approx(-2.0)
    assert output.stats["clip_fraction"].value == 1.0


def test_a_loss_that_selects_does_so_once_over_the_whole_step() -> None:
    loss = PolicyLoss(
        kind="kl_cov", options={"coef": 1.0}, selection={"share": 0.25}, selects="reroll_zoo.algorithms.selections:highest"
    )
    packed = batch()
    packed = packed.replace(
        advantage=torch.tensor([0, 0, 1, -1, 0, 0, 1, 3.0]), logp=torch.tensor([0, 0, -1, -2, 0, 0, -1, -0.1])
    )
    selected = loss.prepare(packed).selected
    assert selected is not None
    assert selected.nonzero().squeeze(1).tolist() == [3]  # (-2 + 1.025) * (-1 - 1), just above the last
    assert PPO.prepare(packed) is packed


def test_an_entropy_bonus_asks_the_model_for_its_entropy_and_lowers_the_loss() -> None:
    loss = PolicyLoss(kind="reinforce", entropy_coef=0.1)
    assert loss.needs.entropy
    model = Predictions(logp=logp_of(-1.0), entropy=torch.where(batch().loss_mask, 2.0, 0.0))
    output = loss(batch(advantage=0.0), model)
    assert output.loss.item() == pytest.approx(-0.2)
    assert output.stats["full_entropy"].value == pytest.approx(2.0)


def test_a_loss_from_a_users_module_is_found_by_its_path() -> None:
    mine = PolicyLoss(kind="reroll.algo.losses:reinforce")
    assert mine(batch(), said(logp_of(-0.7))).loss.item() == pytest.approx(0.7)


def test_the_value_loss_is_half_the_squared_error_and_knows_its_clip() -> None:
    mask = batch().loss_mask
    packed = batch().replace(value=torch.zeros(8), returns=torch.where(mask, 2.0, 99.0))
    model = Predictions(value=torch.where(mask, 1.0, 7.0).requires_grad_())
    assert ValueLoss()(packed, model).loss.item() == pytest.approx(0.5)
    clipped = ValueLoss(clip=0.5)(packed, model)
    assert clipped.loss.item() == pytest.approx(1.5**2 / 2)
    assert clipped.stats["error"].value == pytest.approx(1.0)
    assert clipped.stats["mean"].value == pytest.approx(1.0)


def test_a_critic_that_shares_the_trunk_adds_its_loss() -> None:
    packed = batch().replace(value=torch.zeros(8), returns=torch.where(batch().loss_mask, 2.0, 0.0))
    model = Predictions(logp=logp_of(-0.7), value=torch.zeros(8))
    output = PolicyLoss(kind="reinforce", value=ValueLoss(), value_coef=0.5)(packed, model)
    assert output.loss.item() == pytest.approx(0.7 + 0.5 * 2)
    assert output.stats["value_error"].value == pytest.approx(4.0)
