"""The command line, `shardwise` or `python -m shardwise`."""
