"""How fast, how right and on what: measurements, exact counts, kernels without a GPU, a check-up, evidence."""
