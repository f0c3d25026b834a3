"""Tables larger than the device: rows below it, caches of them, and what caches would do."""
