"""Scans: the operations that run the recurrence. ``efla.scan`` and ``efla.linear_attention`` are the entrances."""
