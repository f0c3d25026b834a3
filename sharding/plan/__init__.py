"""Plans as people read and write them, and as files."""
