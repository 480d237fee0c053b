"""Engines that generate, the worker that drives one, the router the controller sees."""
