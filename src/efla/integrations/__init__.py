"""efla inside other people's software."""
