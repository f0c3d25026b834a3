"""Modules of many tables: pooled, sequence, fused, towers, and what processes features before them."""
