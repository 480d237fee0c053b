"""Environments whose tasks are solved with tools."""
