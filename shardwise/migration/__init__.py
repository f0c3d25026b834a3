"""TorchRec's names: where ours are, programs rewritten, and modules that stand in for theirs."""
