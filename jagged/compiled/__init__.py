"""For models of TorchRec's that are written for torch.compile and torch.export: what traces, hints, and batches."""
