"""Agents: programs that reach the policy through an OpenAI-compatible endpoint, and are trained as they are."""
