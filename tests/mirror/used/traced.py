# type: ignore  # torchrec is served at run time
"""Models are traced and compiled with their batches, and packaged and planned in the words of programs."""
