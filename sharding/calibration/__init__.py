"""The planner's constants measured on the machine at hand, in training steps of small workloads."""
