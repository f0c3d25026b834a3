"""Rows as bytes and back, and lookups of tables that hold them."""
