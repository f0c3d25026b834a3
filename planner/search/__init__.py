"""From a problem in arrays to the best assignment that can be found, with a proof of how good it is."""
