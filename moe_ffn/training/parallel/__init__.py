"""Training on several devices: sharding (FSDP2) and expert parallelism."""
