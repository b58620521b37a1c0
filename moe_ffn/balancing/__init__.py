"""Balancing of routers: losses, pure functions of a Routing, and rules that move a bias."""
