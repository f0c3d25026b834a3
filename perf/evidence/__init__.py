"""Comparisons and long runs whose results are committed; not in the wheel."""
