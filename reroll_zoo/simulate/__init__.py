"""The production scheduler, router and leases on a virtual clock, against modelled engines, trainers and environments."""
