"""One long sequence over many ranks."""
