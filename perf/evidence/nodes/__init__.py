"""Two nodes on one machine: network namespaces, or loopback addresses, with a launcher of its own each."""
