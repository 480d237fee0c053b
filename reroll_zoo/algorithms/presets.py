"""Algorithms by name, beside the core's `grpo`.

Each preset stands for what its paper defines: the estimator, the loss, how tokens are averaged, what is masked. What a paper
tunes (learning rate, batch, KL coefficient where it is a detail) is left to you. docs/algorithms.md has the formulas.
"""

from __future__ import annotations

from typing import Any

_GRPO = {"kind": "normalised", "mean": "group", "std": "group"}
_CENTRED = {"kind": "normalised", "mean": "group", "std": "none"}
_PPO = {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2}

PRESETS: dict[str, dict[str, Any]] = {
    # Estimators: what a reward is compared with.
    "dr_grpo": {"advantage": _CENTRED, "loss": _PPO, "aggregation": "fixed_length"},
    "dapo": {
        "advantage": _GRPO,
        "loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        "aggregation": "token_mean",
        "rollout": {"drop_zero_variance_groups": True},
        "masks": {"overlong": True},
    },
    "lite_ppo": {
        "advantage": {"kind": "normalised", "mean": "group", "std": "batch"},
        "loss": _PPO,
        "aggregation": "token_mean",
    },
    "rloo": {
        "advantage": {"kind": "normalised", "mean": "leave_one_out", "std": "none"},
        "loss": {"kind": "reinforce"},
        "aggregation": "sequence_sum",
    },
    "reinforce": {"advantage": _CENTRED, "loss": {"kind": "reinforce"}, "aggregation": "token_mean"},
    "reinforce++": {
        "advantage": {"kind": "returns", "discount": 1.0, "whiten": True},
        "loss": _PPO,
        "aggregation": "token_mean",
        "kl": {"coef": 0.01, "estimator": "k1", "apply_to": "reward"},
    },
    "reinforce++_baseline": {
        "advantage": {"kind": "normalised", "mean": "group", "std": "batch_centred"},
        "loss": _PPO,
        "aggregation": "token_mean",
        "kl": {"coef": 0.001, "estimator": "k2", "apply_to": "loss"},
    },
    "remax": {"advantage": {"kind": "remax"}, "loss": {"kind": "reinforce"}, "aggregation": "sequence_sum"},
    "opo": {"advantage": {"kind": "opo"}, "loss": {"kind": "reinforce"}, "aggregation": "token_mean"},
    "gpg": {"advantage": {"kind": "gpg"}, "loss": {"kind": "reinforce"}, "aggregation": "token_mean"},
    "gdpo": {"advantage": {"kind": "gdpo"}, "loss": _PPO, "aggregation": "sequence_mean"},
    "pass_at_k": {"advantage": {"kind": "pass_at_k", "k": 4}, "loss": _PPO, "aggregation": "token_mean"},
    "otb": {"advantage": {"kind": "optimal_token_baseline"}, "loss": {"kind": "reinforce"}, "aggregation": "token_mean"},
    "ppo": {
        "advantage": {"kind": "gae", "discount": 1.0, "gae_lambda": 0.95},
        "shaping": {"advantages": {"whiten": True}},
        "loss": _PPO,
        "aggregation": "token_mean",
        "critic": {"kind": "own"},
    },
    # Losses: how the policy follows an advantage, and how far.
    "gspo": {"advantage": _GRPO, "loss": {"kind": "gspo"}, "aggregation": "sequence_mean"},
    "gspo_token": {"advantage": _GRPO, "loss": {"kind": "gspo_token"}, "aggregation": "sequence_mean"},
    "gmpo": {"advantage": _GRPO, "loss": {"kind": "gmpo"}, "aggregation": "sequence_mean"},
    "cispo": {"advantage": _GRPO, "loss": {"kind": "cispo"}, "aggregation": "token_mean"},
    "sapo": {"advantage": _GRPO, "loss": {"kind": "sapo"}, "aggregation": "sequence_mean"},
    "dppo_tv": {"advantage": _CENTRED, "loss": {"kind": "dppo_tv"}, "aggregation": "fixed_length", "old_policy": "sampler"},
    "dppo_kl": {"advantage": _CENTRED, "loss": {"kind": "dppo_kl"}, "aggregation": "fixed_length", "old_policy": "sampler"},
    "clip_cov": {"advantage": _GRPO, "loss": {"kind": "clip_cov"}, "aggregation": "token_mean"},
    "kl_cov": {"advantage": _GRPO, "loss": {"kind": "kl_cov"}, "aggregation": "token_mean"},
    "topr": {"advantage": _CENTRED, "loss": {"kind": "topr"}, "aggregation": "sequence_sum"},
    "kimi": {"advantage": _CENTRED, "loss": {"kind": "kimi"}, "aggregation": "sequence_sum"},
    "dro": {"advantage": _CENTRED, "loss": {"kind": "dro"}, "aggregation": "token_mean"},
    "raft": {
        "advantage": {"kind": "raft"},
        "loss": {"kind": "reinforce"},
        "aggregation": "token_mean",
        "masks": {"zero_advantage": True},
    },
    "raft++": {
        "advantage": {"kind": "raft"},
        "loss": _PPO,
        "aggregation": "sequence_mean",
        "masks": {"zero_advantage": True},
    },
    # Samples from another policy than the one that learns: stale, or drawn in another precision.
    "decoupled_ppo": {
        "advantage": _GRPO,
        "loss": _PPO,
        "aggregation": "token_mean",
        "old_policy": "trainer",
        "corrections": [{"level": "token", "mode": "truncate", "high": 5.0}],
    },
    "tis": {
        "advantage": _GRPO,
        "loss": _PPO,
        "aggregation": "token_mean",
        "old_policy": "trainer",
        "corrections": [{"level": "token", "mode": "truncate", "high": 2.0}],
    },
    "icepop": {
        "advantage": _GRPO,
        "loss": _PPO,
        "aggregation": "token_mean",
        "old_policy": "trainer",
        "corrections": [{"level": "token", "mode": "mask", "low": 0.5, "high": 5.0}],
    },
    # Episodes of several turns.
    "starpo": {"advantage": _GRPO, "loss": {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.28}, "aggregation": "token_mean"},
    "step_reinforce": {
        "advantage": {"kind": "turn_returns", "mean": "batch", "std": "batch"},
        "loss": _PPO,
        "aggregation": "token_mean",
    },
    "gigpo": {"advantage": {"kind": "gigpo"}, "loss": _PPO, "aggregation": "sequence_mean"},
    # A teacher in place of rewards, by what it says of the sampled token, or of every token: add `teachers`.
    "opd": {"distill_only": True, "loss": {"kind": "reinforce"}, "aggregation": "token_mean"},
    "gkd": {
        "distill_only": True,
        "distill": {"divergence": {"kind": "js", "beta": 0.5}},
        "loss": {"kind": "reinforce"},
        "aggregation": "token_mean",
    },
}
"""Each as the fields it stands for; fields that the user writes win over these."""
