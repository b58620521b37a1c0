"""Observation of a run: rows of metrics, the routing of each layer, alarms, the progress display, wandb."""
