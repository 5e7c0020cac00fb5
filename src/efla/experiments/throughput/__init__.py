"""Training throughput of the arms over lengths and batches, measured in turn so that ratios have a spread."""
