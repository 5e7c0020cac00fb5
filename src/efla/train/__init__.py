"""Training: a typed config, a loop that loses no work, PyTorch's own distributed engine, and named recipes."""
