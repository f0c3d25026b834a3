"""The version of shardwise, read here by the build and by the facade."""

__version__ = "0.1.0"
