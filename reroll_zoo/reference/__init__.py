"""Config tree and metrics as documentation: `reroll check --explain`, `reroll schema`, docs/config.md, docs/metrics.md."""
