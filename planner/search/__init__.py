"""The search: from a problem in arrays to the best assignment that can be found, and a proof of how good it is."""
