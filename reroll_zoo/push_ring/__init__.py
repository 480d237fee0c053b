"""Weights by a process group in which the engines are a ring: the way of a push that `weights.kind: broadcast` names."""
