"""`python -m shardwise` is the command `shardwise`."""

from .cli import main

main()
