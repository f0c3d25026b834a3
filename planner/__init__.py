"""Where tables should go. Pure Python: no tensors, no processes."""
