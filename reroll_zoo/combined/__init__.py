"""Rewards made of rewards."""
