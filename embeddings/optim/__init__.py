"""Optimizers of tables, in the backward and beside it, keyed by parameter name."""
