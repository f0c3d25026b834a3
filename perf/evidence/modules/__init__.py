"""Modules beside TorchRec's: managed collision and pools, update after update."""
