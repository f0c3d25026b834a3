"""From tables to a plan, and what can be asked of it: advice, alternatives, changes, files."""
