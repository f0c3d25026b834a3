"""Counts of a step: what it calls, launches, waits for and moves, exactly and without a GPU."""
