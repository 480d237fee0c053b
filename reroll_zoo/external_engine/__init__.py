"""What vLLM and sglang have in common."""
