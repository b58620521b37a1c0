"""Training with Lightning: the only room that imports it."""
