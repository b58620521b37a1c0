"""Feed-forward blocks behind one interface, one file per family."""
