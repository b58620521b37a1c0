"""Training on several devices: expert parallelism around a plan."""
