"""Stand-ins that child processes find on `sys.path`; see shardwise/migration/run.py."""
