"""Proof that two trees train to the same bits: what trains in each, and what compares."""
