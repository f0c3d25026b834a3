"""Rows that lie in files."""
