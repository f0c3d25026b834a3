"""Names of TorchRec that this engine does not need: served, never imported by it."""
