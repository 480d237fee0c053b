"""The command line."""


def main() -> None:
    """Placeholder entry while the commands are written."""
