"""Carries weights from a train cluster to an infer cluster."""
