"""Stand-ins that child processes find on `sys.path`; see shardwise/torchrec_run.py."""
