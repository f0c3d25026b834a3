"""`DistributedModelParallel` and what wraps whole models."""
