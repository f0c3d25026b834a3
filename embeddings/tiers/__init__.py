"""Tables larger than the device: where their rows lie below it, and which rows are on it."""

from .backing import Backing, HostRecords
from .files import FileRecords

__all__ = ["Backing", "FileRecords", "HostRecords"]
