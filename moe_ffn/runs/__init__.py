"""The folder of a run: made, locked, written, read and resumed."""
