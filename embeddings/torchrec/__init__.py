"""Functions of TorchRec's that its programs call around collections of tables."""
