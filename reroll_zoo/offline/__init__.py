"""Pipelines that learn from a fixed table of rows: imitation, preferences, reward models, distillation."""
