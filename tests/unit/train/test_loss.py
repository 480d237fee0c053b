import pickle

import numpy as np
import pytest
import torch

from reroll.config.algorithm import KlConfig, PpoLoss, ReinforceLoss
from reroll.tokens.batch import Batch, pack
from reroll.train.loss import SFT_LOSS, PolicyLoss
from reroll.types import Sample

PPO = PolicyLoss.from_config(PpoLoss(clip_low=0.2, clip_high=0.3), aggregation="token_mean", kl=KlConfig())


def batch(advantage: float = 1.0) -> Batch:
    """Two rows of four tokens; the last two of each are in the loss, sampled at log-prob -1."""
    mask = np.array([False, False, True, True])
    row = Sample(
        ids=np.arange(4),
        loss_mask=mask,
        logp=np.where(mask, -1, 0).astype(np.float32),
        advantage=np.where(mask, advantage, 0).astype(np.float32),
    )
    return pack([row, row])


def logp_of(value: float) -> torch.Tensor:
    return torch.where(batch().loss_mask, value, 0.0).requires_grad_()


def test_it_is_built_from_the_config_and_travels() -> None:
    loss = PolicyLoss.from_config(PpoLoss(clip_low=0.1), aggregation="sequence_mean", kl=KlConfig(coef=0.5, estimator="k2"))
    assert loss == PolicyLoss(
        kind="ppo", options={"clip_low": 0.1, "clip_high": 0.2}, aggregation="sequence_mean", kl_coef=0.5, kl_estimator="k2"
    )
    assert pickle.loads(pickle.dumps(loss)) == loss
    assert PolicyLoss.from_config(ReinforceLoss(kind="reinforce"), aggregation="token_mean", kl=KlConfig()).options == {}


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_that_of_the_policy() -> None:
    logp = logp_of(-2.0)
    output = PPO(batch(advantage=3.0), logp)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-3.0)
    assert output.stats["ratio"].value == 1.0
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0, 0, -0.75, -0.75] * 2)


def test_the_report_says_how_far_the_policy_is_from_the_old_one_and_from_the_sampler() -> None:
    packed = batch().replace(old_logp=logp_of(-2.0).detach())
    values = PPO(packed, logp_of(-1.5)).stats.values_by_name()
    ratio = np.exp(0.5)
    assert values["ratio"] == values["ratio_max"] == pytest.approx(ratio)
    assert values["kl_old"] == pytest.approx(ratio - 1 - 0.5, abs=1e-6)
    assert values["sampler_gap"] == values["sampler_gap_max"] == pytest.approx(0.5)
    assert values["entropy"] == pytest.approx(1.5)
    assert values["clip_fraction"] == 1.0
    assert values["loss"] == pytest.approx(-1.3)


def test_only_tokens_that_clipping_holds_back_count_as_clipped() -> None:
    packed = batch(advantage=-1.0).replace(old_logp=logp_of(-2.0).detach())
    assert PPO(packed, logp_of(-1.5)).stats["clip_fraction"].value == 0.0
    assert PPO(packed, logp_of(-2.5)).stats["clip_fraction"].value == 1.0


def test_a_kl_penalty_adds_its_share_and_reports_it() -> None:
    loss = PolicyLoss(kind="reinforce", kl_coef=0.5, kl_estimator="k1")
    packed = batch(advantage=0.0).replace(ref_logp=logp_of(-3.0).detach())
    output = loss(packed, logp_of(-2.0))
    assert output.loss.item() == pytest.approx(0.5)
    assert output.stats["kl_ref"].value == pytest.approx(1.0)


def test_a_kl_penalty_without_reference_logprobs_is_an_error() -> None:
    with pytest.raises(ValueError, match="no ref_logp"):
        PolicyLoss(kind="reinforce", kl_coef=0.5)(batch(), logp_of(-1.0))


def test_the_sft_loss_is_the_mean_cross_entropy_of_the_masked_tokens() -> None:
    assert SFT_LOSS(batch(), logp_of(-0.7)).loss.item() == pytest.approx(0.7)


def test_stats_of_micro_batches_merge_to_those_of_the_batch() -> None:
    packed, logp = batch(), torch.where(batch().loss_mask, -torch.arange(8.0), 0.0)
    whole = PPO(packed.replace(old_logp=logp - 0.1), logp).stats
    parts = [
        PPO(packed.replace(old_logp=logp - 0.1).select([index]), logp[4 * index : 4 * index + 4]).stats for index in range(2)
    ]
    merged = (parts[0] + parts[1]).values_by_name()
    assert merged == pytest.approx(whole.values_by_name())


def test_a_micro_batch_without_loss_tokens_reports_nothing_but_a_zero_loss() -> None:
    packed = batch().replace(loss_mask=torch.zeros(8, dtype=torch.bool))
    output = SFT_LOSS(packed, torch.zeros(8, requires_grad=True))
    assert output.stats.values_by_name() == {"loss": 0.0}
