"""Shares of a sequence, as far as one process can tell: what a group of one says is what a model alone says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from reroll.config.load import parse_config
from reroll.errors import ConfigError, ModelError
from reroll.models.attention import PackedAttention, Scoring
from reroll.models.load import load_model
from reroll.tokens.batch import Batch, pack
from reroll.training.base import Needs, required
from reroll.training.predict import apply_heads, predict
from reroll.types import Sample
from reroll_zoo.fsdp2.config import Fsdp2StrategyConfig
from reroll_zoo.fsdp2.mesh import build_mesh, sequence_group
from reroll_zoo.fsdp2.sequence import SequenceParallelAttention, SequenceShare, check_shares
from reroll_zoo.ranks.group import DataParallelRanks, join_process_group
from reroll_zoo.tiny_models import make_tiny

NEEDS = Needs(entropy=True, value=True, score=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32, heads=4, kv_heads=2)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    join_process_group(None, rank=0, world_size=1, device="cpu")
    yield known_group()
    dist.destroy_process_group()


def known_group() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


def siblings(*, with_loss: bool = True) -> Batch:
    """Two rows that begin alike and one that does not; the last has no token in the loss."""
    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 10, 11, 12], [13, 14]]
    masks = [np.arange(len(ids)) >= (2 if with_loss and len(ids) > 2 else len(ids)) for ids in rows]
    return pack(
        [
            Sample(ids=np.array(ids), loss_mask=mask, logp=np.zeros(len(ids), np.float32), turn=np.where(mask, 0, -1))
            for ids, mask in zip(rows, masks, strict=True)
        ]
    )


@pytest.mark.parametrize("with_loss", [True, False])
def test_a_rank_that_shares_with_nobody_answers_and_learns_like_a_model_alone(
    folder: Path, group: dist.ProcessGroup, with_loss: bool
) -> None:
    batch, gradients = siblings(with_loss=with_loss), []
    answers: list[dict[str, Tensor]] = []
    for shared in (False, True):
        model = load_model(str(folder), dtype=torch.float32, device="cpu", head="language+score")
        torch.nn.init.constant_(model.get_submodule("score").weight, 0.1)  # type: ignore[arg-type]
        if shared:
            share = SequenceShare(batch, group)
            said = share.whole(apply_heads(model, share.states(model), share.batch, NEEDS, chunk=3))
        else:
            alone = predict(model, batch, NEEDS, chunk=3)
            said = {name: required(getattr(alone, name)) for name in ("logp", "entropy", "value", "score")}
        answers.append(said)
        (said["logp"].sum() + said["entropy"].square().sum() + said["value"].sum() + said["score"].square().sum()).backward()
        gradients.append({name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None})
    torch.testing.assert_close(answers[1], answers[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-5)
    assert answers[0]["logp"].any() == with_loss


def test_a_share_asks_about_the_tokens_that_its_states_predict_and_about_the_ends(group: dist.ProcessGroup) -> None:
    batch = siblings()
    share = SequenceShare(batch, group).batch
    predicted = batch.ids[batch.loss_mask]
    assert share.ids[share.loss_mask].tolist() == predicted.tolist()
    assert share.lengths == [len(predicted) + 1, 1, 1, 1]
    assert share.ids[-3:].tolist() == [9, 12, 14]
    assert (share.num_loss_tokens, share.num_sequences) == (batch.num_loss_tokens, batch.num_sequences)


def test_heads_keep_their_order_and_padding_is_dropped_and_put_back(group: dist.ProcessGroup) -> None:
    width, num_tokens = 6, 5
    query, key, value = torch.randn(width, 4, 8), torch.randn(width, 2, 8), torch.randn(width, 2, 8)
    packed = PackedAttention(torch.tensor([0, 2, num_tokens]))
    scoring = Scoring(scaling=0.3)
    shared = SequenceParallelAttention(packed, group, num_tokens=num_tokens).attend(0, query, key, value, scoring=scoring)
    real = [tensor[:num_tokens] for tensor in (query, key, value)]
    torch.testing.assert_close(shared[:num_tokens], packed.attend(0, *real, scoring=scoring))
    assert not shared[num_tokens:].any()


def test_heads_that_cannot_be_shared_evenly_are_refused_with_the_fix(folder: Path) -> None:
    model = load_model(str(folder), dtype=torch.float32, device="cpu")
    check_shares(model, sp=4, tp=1)  # More ranks than key-value heads: those are repeated.
    with pytest.raises(ModelError, match=r"4 attention heads cannot be shared by 3 ranks: set strategy.sp to a divisor of 4"):
        check_shares(model, sp=3, tp=1)
    with pytest.raises(ModelError, match=r"2 attention heads \(of each of 2 splits\) cannot be shared by 4 ranks"):
        check_shares(model, sp=4, tp=2)


@pytest.mark.usefixtures("group")
def test_one_rank_has_a_share_of_its_own_and_no_partner() -> None:
    ranks = DataParallelRanks(ranks_per_share=1)
    assert (ranks.rank, ranks.size, sequence_group(Fsdp2StrategyConfig(kind="fsdp2"), device="cpu")) == (0, 1, None)
    with pytest.raises(ValueError, match="1 ranks do not divide into replicas 1 × sp 2 × tp 1"):
        build_mesh(Fsdp2StrategyConfig(kind="fsdp2", sp=2), device="cpu")


def test_ranks_that_share_sequences_take_that_many_more_tokens_through_together() -> None:
    strategy = Fsdp2StrategyConfig(kind="fsdp2", sp=4, tp=2, micro_batch_tokens=1000)
    assert (strategy.pass_tokens, strategy.ranks_per_share) == (4000, 8)


@pytest.mark.parametrize(
    ("strategy", "where", "says"),
    [
        ({"num_ranks": 6, "sp": 4}, "policy.strategy", "make replicas × sp × tp a divisor of the number of ranks"),
        ({"num_ranks": 3, "sp": 3}, "policy.strategy.sp", "make sp × tp a divisor of 4"),
    ],
)
def test_check_refuses_shares_that_cannot_run_and_names_the_fix(
    rlvr_tree: dict[str, Any], tmp_path: Path, folder: Path, strategy: dict[str, Any], where: str, says: str
) -> None:
    rlvr_tree["runtime"] = {"kind": "ray"}
    rlvr_tree["policy"] |= {"model": str(folder), "devices": "cpu", "strategy": {"kind": "fsdp2", **strategy}}
    with pytest.raises(ConfigError) as caught:
        parse_config(rlvr_tree, folder=tmp_path)
    assert [violation.path for violation in caught.value.violations] == [where]
    assert says in caught.value.violations[0].fix
