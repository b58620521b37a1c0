"""WHERE: the pairs sorted by expert; a plan, not moved data."""
