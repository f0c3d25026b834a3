"""TorchRec's streams of Criteo's and MovieLens' text files, and its scripts that turn Criteo's into numpy files."""
