"""Every family of ops on small inputs, held to its reference, and what else holds a kernel to one."""
