"""What `import torchrec` finds in a child of `python -m shardwise.torchrec`; shardwise/torchrec_run.py says how."""

from shardwise.torchrec_run import take_over

take_over(__name__)
