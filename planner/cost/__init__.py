"""What a way to cut a table costs: our engine's model and TorchRec's."""
