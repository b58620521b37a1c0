"""Studies: a question, the runs that answer it, and what they say."""
