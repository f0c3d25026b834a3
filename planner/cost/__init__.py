"""Costs of the ways to cut a table: our engine's model and TorchRec's."""
