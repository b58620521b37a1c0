"""Monitoring of a run: metrics, routing of each layer, alarms, progress display, wandb."""
