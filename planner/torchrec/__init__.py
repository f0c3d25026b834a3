"""TorchRec's planner by its names: options, estimators, proposers, partitioners, reservations, stats."""
