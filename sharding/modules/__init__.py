"""Sharded modules and the sharders that make them."""
