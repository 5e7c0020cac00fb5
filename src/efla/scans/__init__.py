"""Scans run the recurrence over tokens. The entry points are ``efla.scan`` and ``efla.linear_attention``."""
