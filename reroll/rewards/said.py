"""The old name of `reroll.testing.trajectory_of`, for tests that import it from here."""

from reroll.testing import trajectory_of as said

__all__ = ["said"]
