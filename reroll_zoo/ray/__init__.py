"""Ray as a runtime: workers are actors, over one node or many."""
