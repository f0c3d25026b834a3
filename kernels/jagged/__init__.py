"""Ops on jagged values: offsets, padding, permutes, selection, products, buckets, distinct ids."""
