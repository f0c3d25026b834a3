"""The ops' CPU path: loops that numba compiles, and torch alone where numba is missing."""

from .lookup import ids_are_good, offsets_are_good

__all__ = ["ids_are_good", "offsets_are_good"]
