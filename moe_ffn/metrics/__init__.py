"""What is measured of a routing: pure functions, and thin torchmetrics over them."""
