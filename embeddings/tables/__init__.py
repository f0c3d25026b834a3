"""Tables that share memory, their lookups as autograd sees them, and the checks of what is looked up."""
