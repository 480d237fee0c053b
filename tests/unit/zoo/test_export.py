"""Which rank writes which layers of a folder that all write together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reroll_zoo.ranks.export import LayerShares


@given(num_ranks=st.integers(1, 9), num_layers=st.integers(0, 30), data=st.data())
def test_a_layers_weights_are_written_together_and_ranks_write_as_much_as_each_other(
    num_ranks: int, num_layers: int, data: st.DataObject
) -> None:
    names = [f"model.layers.{layer}.{part}" for layer in range(num_layers) for part in ("q_proj", "mlp.experts.down_proj")]
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    names = data.draw(st.permutations(names)) if data.draw(st.booleans()) else names
    shares = [LayerShares(num_ranks) for _ in range(num_ranks)]
    owners = {name: {share.owner_of(name, 10) for share in shares} for name in names}
    assert all(len(found) == 1 for found in owners.values()), "all ranks find the same"
    for layer in range(num_layers):
        mine = [owners[name] for name in names if name.startswith(f"model.layers.{layer}.")]
        assert mine[0] == mine[1]
    writers = sorted({rank for found in owners.values() for rank in found})
    files = [shares[0].file_of(rank) for rank in range(num_ranks)]
    assert [rank for rank, file in enumerate(files) if file] == writers
    assert len({file for file in files if file}) == len(writers)
    if len(writers) == 1:
        assert files[writers[0]] == "model.safetensors"


def test_what_one_layer_after_the_other_gives_each_rank_differs_by_one_layer_at_most() -> None:
    shares, loads = LayerShares(4), [0] * 4
    for layer in range(30):
        for part, size in {"attention": 3, "mlp": 7}.items():
            loads[shares.owner_of(f"model.layers.{layer}.{part}", size)] += size
    assert max(loads) - min(loads) <= 10
