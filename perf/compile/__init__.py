"""Kernels compiled for GPUs that need not be present, and what is promised of the result."""
