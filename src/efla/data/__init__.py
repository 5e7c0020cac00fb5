"""Data of the experiments and of training."""
