"""Plans: made from tables, explained, changed, written to files; and advice where there is none."""
