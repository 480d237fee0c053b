"""Curricula: which prompts are worth the next try, by how often they passed so far."""
