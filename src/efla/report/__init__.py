"""One self-contained HTML page from the rows of runs."""
