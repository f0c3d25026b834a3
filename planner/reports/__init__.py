"""A plan in words and as a page of HTML."""
