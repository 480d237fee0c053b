"""From a config node to an environment. What an environment needs is imported when the first of its kind is asked for."""

from __future__ import annotations

from collections.abc import Mapping

from reroll.config.envs import EnvConfig, ImportEnvConfig
from reroll.envs.base import Env
from reroll.errors import RerollError, short_error


def make_env(node: EnvConfig) -> Env:
    """A new environment. Raises what its module or its class raises."""
    made: Env = node.make()
    return made


def env_name(node: EnvConfig) -> str:
    """How messages call it: a user's class by its path, all others by their kind."""
    return node.path if isinstance(node, ImportEnvConfig) else node.kind


def import_problems(nodes: Mapping[str, EnvConfig]) -> dict[str, str]:
    """Import what the environments of all domains need, ahead of the first episode. Domains that cannot, and why."""
    problems: dict[str, str] = {}
    for domain, node in nodes.items():
        try:
            node.prepare()
        except RerollError as error:
            problems[domain] = str(error)
        except (Exception, SystemExit) as error:
            problems[domain] = short_error(error)
    return problems
