"""Strategies that train a model, the worker that drives one, the cluster the controller sees."""
