"""Environments of other libraries behind the Env seam."""
