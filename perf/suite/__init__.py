"""The regression suite: cases, how they are measured, stored, compared and shown."""
