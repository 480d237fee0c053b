"""What reroll's core can do without: games, shops, adapters, generated tasks, verifiers.

It is found as a third party's package is, by entry points (`reroll.config.registry`), and imports documented seams only.
"""
