"""sglang as an engine, in a process and a Python environment of its own. Only `server` imports sglang, and only there."""
