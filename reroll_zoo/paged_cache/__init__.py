"""The embedded engine's cache on a GPU: pages, one kernel for all that a step reads, steps as CUDA graphs."""
