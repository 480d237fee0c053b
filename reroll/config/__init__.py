"""The config tree: one strict pydantic model per pipeline. Loads neither torch nor ray."""
