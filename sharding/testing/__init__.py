"""What TorchRec's programs test themselves with: ranks as processes, a small model, sharders of one way to cut."""
