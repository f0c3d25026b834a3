"""The tuner: configs timed on the machine at hand."""
