"""`python -m reroll`: the same as the `reroll` command."""

from reroll.cli import main

main()
