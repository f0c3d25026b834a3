"""The step of a sharded collection: routes, exchange of ids and rows, owned tables, states, resharding."""
