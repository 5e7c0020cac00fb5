"""Training: a typed config, a loop whose runs resume bit-identically, distributed engines, and named recipes."""
