"""Tables larger than the device: where their rows lie below it, and which rows are on it."""

from .backing import Backing, HostRecords
from .files import FileRecords
from .io_queue import IoQueue, Job
from .ram_cache import RamOverFile

__all__ = ["Backing", "FileRecords", "HostRecords", "IoQueue", "Job", "RamOverFile"]
