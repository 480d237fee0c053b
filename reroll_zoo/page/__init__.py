"""A web page of a run, served from its folder: what every sample does, the course of time, curves, samples, the config."""
