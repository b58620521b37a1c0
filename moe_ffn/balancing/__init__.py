"""Pure functions of a Routing that push a router towards balance."""
