"""`python -m shardwise` is the command `shardwise`."""

from .cli.main import main

main()
