"""What `shardwise doctor` looks at: versions, devices, bandwidths, a self-test, what is tuned and what is proven."""
