"""Checkpoints that fit any plan: saved shard by shard, atomic, loaded under another plan and number of ranks.

`shardwise.checkpoint` has the public names.
"""
