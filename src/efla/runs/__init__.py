"""What every job writes and draws: output folders, rows, provenance, progress, statistics, tables and charts."""
