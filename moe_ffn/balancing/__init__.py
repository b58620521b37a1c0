"""What pushes routers towards balance: losses, pure functions of a Routing, and rules that move a bias."""
