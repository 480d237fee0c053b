"""Updates that begin before all samples of their step are there (`train.stream`)."""
