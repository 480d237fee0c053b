"""Mixtures of experts: which families' choices of experts can be noted and replayed (docs/moe.md), and how."""
