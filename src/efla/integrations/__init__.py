"""efla inside other libraries."""
