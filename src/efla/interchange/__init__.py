"""Checkpoints of other libraries, in and out."""
