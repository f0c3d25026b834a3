"""DLRM on generated clicks, thousands of steps beside TorchRec."""
