"""Sections of `shardwise doctor`: versions, devices, bandwidths, a self-test, what is tuned and what is proven."""
