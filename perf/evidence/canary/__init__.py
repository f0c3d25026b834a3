"""A canary in the real TorchRec."""
