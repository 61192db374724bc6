"""Accuracy, paired: the matrix of configurations against the unsplit model (docs/accuracy.md)."""
