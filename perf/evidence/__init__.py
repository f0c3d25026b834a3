"""Evidence: comparisons with TorchRec and FBGEMM that are no timings of one op, each with one document to keep it.

`python -m shardwise.perf.evidence NAME` (or `make evidence NAME=...`) runs one; needs a checkout.
"""
