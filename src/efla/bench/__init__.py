"""Measurements: ratios between contenders timed in turn in one process, never a time on its own."""
