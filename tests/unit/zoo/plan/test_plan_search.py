"""Maps worked out, chosen and refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from reroll.config.load import parse_config
from reroll.config.tree import RlvrConfig
from reroll.errors import ConfigError
from reroll_zoo.plan.cluster import ClusterConfig
from reroll_zoo.plan.draw import draw_plan, lanes_of
from reroll_zoo.plan.memory import CONTEXT_BYTES
from reroll_zoo.plan.plan import Plan, make_plan
from reroll_zoo.plan.planner import assign_devices, memory_violations
from reroll_zoo.plan.search import as_devices, best_plan, candidates, device_violations

H100 = ClusterConfig(device="h100", num=8)
TREE: dict[str, Any] = {
    "pipeline": "rlvr",
    "runtime": {"kind": "ray", "num_gpus": 8},
    "policy": {
        "model": "Qwen/Qwen3-8B",
        "devices": "0-7",
        "strategy": {"kind": "fsdp2", "precision": "bf16", "gradient_checkpointing": True},
        "swap": "optimizer",
    },
    "engine": {"devices": "0-7", "num_workers": 8, "max_running": 32, "sleep": True},
    "data": {"train": [{"kind": "jsonl", "path": "rows.jsonl"}]},
    "rewards": {"default": {"kind": "exact"}},
    "rollout": {"prompts_per_step": 64, "group_size": 8, "max_prompt_tokens": 512, "max_tokens": 2048},
}


def config_of(**changes: Any) -> RlvrConfig:
    """The config above with dotted keys changed."""
    tree = copy.deepcopy(TREE)
    for key, value in changes.items():
        *path, last = key.split("__")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
    config = parse_config(tree, runs_here=False)
    assert isinstance(config, RlvrConfig)
    return config


def terms_of(plan: Plan, device: str, role: str) -> set[str]:
    load = next(load for load in plan.loads if load.device == device)
    return {term.name for term in load.terms if term.role == role}


def test_a_shared_device_holds_one_at_work_and_what_the_other_leaves() -> None:
    plan = make_plan(config_of(engine__max_running=64), H100)
    assert plan.fits
    assert {load.phase for load in plan.loads} == {"generate"}
    assert terms_of(plan, "3", "policy") == {"parameters"}, "the optimizer waits in the host's memory"
    everything = make_plan(config_of(policy__swap="none", engine__sleep=False), H100)
    assert everything.fullest.num_bytes > plan.fullest.num_bytes
    assert {"optimizer", "activations", "gradients"} <= terms_of(everything, "3", "policy")


def test_every_process_opens_the_device_once() -> None:
    def contexts(plan: Plan) -> int:
        return sum(term.num_bytes for term in plan.loads[0].terms if term.name == "CUDA context")

    assert contexts(make_plan(config_of(), H100)) == 2 * CONTEXT_BYTES
    assert contexts(make_plan(config_of(kl={"coef": 0.1}), H100)) == 3 * CONTEXT_BYTES
    for kind, num_processes in (("local", 1), ("processes", 2)):
        alone = config_of(runtime={"kind": kind}, policy__strategy={"kind": "torch"}, policy__devices=0, engine={"devices": 0})
        assert contexts(make_plan(alone, H100)) == num_processes * CONTEXT_BYTES


def test_in_one_process_on_one_device_the_engine_adopts_the_trainers_weights() -> None:
    changes: dict[str, Any] = {
        "runtime": {"kind": "local"},
        "policy": {"model": "Qwen/Qwen3-0.6B", "devices": 0},
        "engine": {"devices": 0},
    }
    assert "weights" not in make_plan(config_of(**changes), H100).roles[1].memory.held
    assert "weights" in make_plan(config_of(**changes, rollout__max_staleness=1), H100).roles[1].memory.held


def test_a_step_is_the_sum_of_its_phases_when_roles_take_turns() -> None:
    plan = make_plan(config_of(), H100)
    assert plan.step_s == pytest.approx(sum(plan.seconds(phase) for phase in ("generate", "train", "push")))


def test_with_a_staleness_budget_disjoint_roles_work_at_the_same_time() -> None:
    split: dict[str, Any] = {"policy__devices": "0-3", "engine": {"devices": "4-7", "num_workers": 4}}
    sync, stale = make_plan(config_of(**split), H100), make_plan(config_of(**split, rollout__max_staleness=1), H100)
    assert sync.step_s == pytest.approx(sum(sync.seconds(phase) for phase in ("generate", "train", "push")))
    assert stale.step_s == pytest.approx(max(stale.seconds("generate"), stale.seconds("train")) + stale.seconds("push"))


def test_engine_workers_whose_devices_the_trainer_leaves_alone_write_while_it_trains() -> None:
    changes: dict[str, Any] = {"policy__devices": "0-3", "rollout__max_staleness": 1}
    plan = make_plan(config_of(**changes), H100)
    beside, after = [bar for bar in plan.bars if bar.phase == "generate"]
    assert (beside.devices, after.devices) == (tuple("4567"), tuple("01234567"))
    whole_s = make_plan(config_of(policy__devices="0-3"), H100).seconds("generate")
    assert beside.seconds / 2 + after.seconds == pytest.approx(whole_s), "half of the workers do half of the work"
    assert {load.phase for load in plan.loads if load.device in "4567"} == {"generate"}


def test_a_map_that_cannot_fit_is_refused_with_the_sum_and_with_what_would_fit() -> None:
    larger: dict[str, Any] = {"rollout__prompts_per_step": 256}
    plan = make_plan(config_of(**larger, engine__max_running=256), H100)
    [violation] = device_violations(plan)
    total = sum(term.num_bytes for term in plan.fullest.terms) / 2**30
    assert f"would hold {total:.1f} GiB" in violation.problem
    assert "engine KV cache" in violation.problem
    assert "of the 79.1 GiB of a h100 72.8" in violation.problem
    key, value = violation.fix.removeprefix("any one of these fits: ").split("; ")[0].split("=")
    assert key == "engine.max_running"
    assert make_plan(config_of(**larger, engine__max_running=int(value)), H100).fits
    assert not make_plan(config_of(**larger, engine__max_running=2 * int(value)), H100).fits


def test_what_no_setting_can_save_is_told_the_size_of_device_it_needs() -> None:
    config = config_of(policy={"model": "Qwen/Qwen3-32B", "devices": 0}, engine={"devices": 0})
    [violation] = device_violations(make_plan(config, H100))
    assert "it needs devices of" in violation.fix
    assert "strategy.kind=fsdp2" in violation.fix


def test_auto_takes_the_fastest_map_that_fits() -> None:
    config = config_of(policy__devices="auto", engine={"max_running": 32, "sleep": True}, rollout__max_staleness=1)
    plans = [make_plan(candidate, H100) for candidate in candidates(config, H100)]
    best = best_plan(config, H100)
    assert best.fits
    assert best.step_s == pytest.approx(min(plan.step_s for plan in plans if plan.fits))
    kinds = {_kind(plan) for plan in plans}
    assert kinds == {"colocated", "disjoint", "overlapping"}


def _kind(plan: Plan) -> str:
    policy, engine = set(plan.roles[0].devices), set(plan.roles[1].devices)
    return "colocated" if policy == engine else "overlapping" if policy & engine else "disjoint"


def test_auto_cuts_layers_into_whole_heads_inside_a_node_and_leaves_what_the_file_says() -> None:
    free = config_of(policy__devices="auto", engine={"kind": "vllm"})
    sizes = {(one.policy.strategy.tp, one.engine.tp) for one in candidates(free, H100)}  # type: ignore[union-attr]
    assert {policy for policy, _ in sizes} == {engine for _, engine in sizes} == {1, 2, 4, 8}
    engine = {"kind": "vllm", "num_workers": 2, "devices": "6-7"}
    told = config_of(policy__devices="auto", policy__strategy__tp=2, engine=engine)
    for one in candidates(told, H100):
        assert isinstance(one, RlvrConfig)
        assert one.policy.strategy.tp == 2  # type: ignore[union-attr]
        assert (one.engine.num_workers, one.engine.devices) == (2, "6-7")


def test_in_one_process_auto_does_not_add_engines() -> None:
    config = config_of(runtime={"kind": "local"}, policy={"model": "Qwen/Qwen3-0.6B"}, engine={})
    assert {one.engine.num_workers for one in candidates(config, H100) if isinstance(one, RlvrConfig)} == {1}
    apart = config_of(runtime={"kind": "processes"}, policy={"model": "Qwen/Qwen3-0.6B"}, engine={})
    assert {one.engine.num_workers for one in candidates(apart, H100) if isinstance(one, RlvrConfig)} > {1}


def test_a_run_gets_a_map_for_the_devices_that_there_are_and_none_where_there_is_nothing_to_choose() -> None:
    config = config_of(policy__devices="auto", engine={"max_running": 32}, cluster={"device": "h200", "num": 8})
    planned = assign_devices(config, num_gpus=4)
    assert "auto" not in (planned.policy.devices, planned.engine.devices)
    assert all(int(device) < 4 for role in make_plan(planned, H100).roles for device in role.devices)
    assert assign_devices(config, num_gpus=0) is config
    fixed = config_of()
    assert assign_devices(fixed, num_gpus=8) is fixed
    unknown = config_of(policy__model="nobody/knows-this", policy__devices="auto")
    assert assign_devices(unknown, num_gpus=8) is unknown


def test_devices_are_written_as_a_config_writes_them() -> None:
    assert [as_devices(d) for d in (("cpu",), ("3",), ("2", "3", "4"), ("0", "2"))] == ["cpu", 3, "2-4", [0, 2]]


def test_a_picture_has_a_row_for_devices_that_do_the_same(tmp_path: Path) -> None:
    config = config_of(policy__devices="0-3", rollout__max_staleness=1, kl={"coef": 0.1})
    plan = make_plan(config, H100)
    assert [as_devices(lane.devices) for lane in lanes_of(plan)] == ["0-3", "4-7"]
    for name in ("plan.svg", "plan.png"):
        draw_plan(plan, tmp_path / name, title="a plan")
        assert (tmp_path / name).stat().st_size > 5_000
    words = (tmp_path / "plan.svg").read_text()
    assert all(word in words for word in ("GPU 0-3", "GPU 4-7", "train", "generate", "score reference", "optimizer"))


def test_the_role_that_takes_most_is_named_and_its_own_settings_are_advised() -> None:
    config = config_of(critic={"kind": "own", "devices": 7}, advantage={"kind": "gae"}, policy__devices="0-6")
    [violation] = device_violations(make_plan(config, H100))
    assert violation.path == "critic.devices"
    assert "critic.strategy.precision=bf16" in violation.fix


def test_a_role_on_the_cpu_is_timed_as_one_and_its_host_is_not_judged() -> None:
    changes: dict[str, Any] = {"kl": {"coef": 0.1}, "teachers": {"big": {"model": "Qwen/Qwen3-32B", "devices": "cpu"}}}
    plan = make_plan(config_of(**changes), H100)
    assert plan.fits
    assert plan.loads[-1].device == "cpu"
    assert plan.loads[-1].num_bytes > H100.memory_bytes_of("0")
    [teacher] = [bar for bar in plan.bars if bar.role == "teacher big"]
    [reference] = [bar for bar in plan.bars if bar.role == "reference"]
    assert teacher.seconds > 1000 * reference.seconds
    assert any("not judged" in note for note in plan.notes)


def test_vllm_takes_its_pool_while_the_policy_is_still_there() -> None:
    """Once the run is going the policy leaves; when workers are made, it has not."""
    config = config_of(policy__swap="all", engine={"kind": "vllm", "devices": "0-7", "num_workers": 8, "sleep": True})
    plan = make_plan(config, H100)
    built = {name for role in plan.roles for name in role.built}
    assert built == {"parameters", "weights", "KV cache", "engine step"}
    greedy = config.model_copy(update={"engine": config.engine.model_copy(update={"gpu_memory_utilization": 0.9})})
    [violation] = device_violations(make_plan(greedy, H100))
    assert "(start)" in violation.problem
    assert "engine.gpu_memory_utilization=0.85" in violation.fix


def test_an_unknown_family_is_planned_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "olmo2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"intermediate_size": 128, "vocab_size": 100}'
    )
    config = config_of(policy__model=str(tmp_path))
    assert any("olmo2" in note for note in make_plan(config, H100).notes)


# Where optimizers lie

H200 = ClusterConfig(device="h200", num=1)


def alone(**changes: Any) -> RlvrConfig:
    """The model on one GPU, with its engine."""
    strategy = {"kind": "torch", "precision": "bf16", **changes.pop("strategy", {})}
    return config_of(runtime={"kind": "local"}, policy__strategy=strategy, policy__devices=0, engine__devices=0, **changes)


def optimizer_of(plan: Plan) -> str:
    return plan.config.policy.strategy.optimizer  # type: ignore[attr-defined, no-any-return]


def test_an_optimizer_lies_on_the_host_where_that_makes_it_fit_and_only_there() -> None:
    one = {"engine__num_workers": 1}
    full = best_plan(alone(**one), H200)
    assert (optimizer_of(full), full.fits) == ("host", True)
    assert full.roles[0].host == {"fp32 masters": 4 * 8_190_735_360, "optimizer": 8 * 8_190_735_360}
    assert "91.5 GiB in page-locked memory" in " ".join(full.notes)
    asked = best_plan(alone(**one, strategy={"optimizer": "gpu"}), H200)
    assert (optimizer_of(asked), asked.fits) == ("gpu", False)
    assert "policy.strategy.optimizer=host" in device_violations(asked)[0].fix
    for smaller in ({"policy__lora": {"rank": 16}}, {"policy__model": "Qwen/Qwen3-0.6B"}):
        plan = best_plan(alone(**one, **smaller), H200)
        assert (optimizer_of(plan), plan.fits) == ("auto", True)
        assert not plan.roles[0].host


def test_an_optimizer_stays_where_it_is_quicker_if_only_estimates_are_too_large_and_stay_so() -> None:
    plan = best_plan(alone(engine__num_workers=1, policy__model="Qwen/Qwen3-4B", strategy={"micro_batch_tokens": 65_536}), H200)
    assert (optimizer_of(plan), plan.fits) == ("auto", False)


def test_a_step_with_the_optimizer_on_the_host_is_planned_to_take_as_long_as_its_way_through_the_device() -> None:
    beside, there = (make_plan(alone(engine__num_workers=1, strategy={"optimizer": where}), H200) for where in ("gpu", "host"))
    num_bytes = 12 * 8_190_735_360
    assert there.step_s - beside.step_s == pytest.approx(num_bytes / (55e9 * 0.7))


def test_an_optimizer_is_put_on_the_host_before_models_are_loaded_and_one_that_fits_nowhere_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = alone(engine__num_workers=1, cluster={"device": "h200", "num": 1})
    assert assign_devices(config, num_gpus=1).policy.strategy.optimizer == "host"  # type: ignore[attr-defined]
    assert assign_devices(config, num_gpus=0) is config
    offline = parse_config(
        {
            "pipeline": "sft",
            "runtime": {"kind": "local"},
            "policy": {"model": "Qwen/Qwen3-8B", "devices": 0, "strategy": {"precision": "bf16"}},
            "data": {"train": [{"kind": "jsonl", "path": "rows.jsonl"}]},
            "cluster": {"device": "h200", "num": 1},
        },
        runs_here=False,
    )
    assert assign_devices(offline, num_gpus=1).policy.strategy.optimizer == "host"  # type: ignore[attr-defined]
    here = config.model_copy(update={"cluster": None})
    monkeypatch.setattr("reroll_zoo.plan.plan.num_visible_gpus", lambda: 1)
    monkeypatch.setattr("reroll_zoo.plan.plan.gpu_names", lambda: ["NVIDIA H200"])
    for gib, refused in ((64, True), (128, False)):
        monkeypatch.setattr("reroll_zoo.plan.planner.host_memory_bytes", lambda gib=gib: gib * 2**30)
        found, _ = memory_violations(here)
        assert [one.path for one in found] == (["policy.strategy.optimizer"] if refused else [])


@pytest.mark.parametrize("kind", ["fsdp2", "deepspeed"])
def test_a_strategy_of_several_ranks_says_what_it_has_instead(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"an option of torch; .* cpu_offload: true"):
        config_of(policy__strategy={"kind": kind, "optimizer": "host"})
