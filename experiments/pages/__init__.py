"""Self-contained HTML pages: one file that opens from disk, with no server and no network."""
