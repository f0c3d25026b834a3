"""Scripts that run on a machine with GPUs: checks, A/B, profile, collectives."""
