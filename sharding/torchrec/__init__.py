"""What TorchRec has names for and this engine does not need: served, never imported by it."""
