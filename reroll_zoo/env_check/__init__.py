"""`reroll envs check`: an environment, played and checked for what training relies on."""
