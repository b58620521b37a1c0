"""Balancing of experts: losses, which are pure functions of a Routing, and rules that update a bias."""
