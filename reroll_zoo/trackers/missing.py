"""What is said of a tracker whose package is not installed."""

from __future__ import annotations

from reroll.errors import ConfigError, Violation


def missing_package(name: str, *, extra: str = "trackers") -> ConfigError:
    """The error, with what pip installs."""
    return ConfigError([Violation("run.trackers", f"{name} is not installed", f"pip install 'reroll[{extra}]', or remove it")])
