"""HOW FAST: the experts' arithmetic on a plan, one signature, several backends."""
