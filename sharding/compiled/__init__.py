"""Sharded steps in graphs of torch.compile: one op forward and one backward for each collection, and none breaks."""
