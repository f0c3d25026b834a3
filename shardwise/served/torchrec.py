"""What `import torchrec` finds in a child of `python -m shardwise.torchrec`; shardwise/migration/run.py says how."""

from shardwise.migration.run import take_over

take_over(__name__)
