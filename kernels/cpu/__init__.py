"""What the ops run on the CPU: loops that numba compiles, and torch alone where numba is missing."""
