"""Load balancing: losses, which are pure functions of a Routing, and rules that update a router's bias."""
