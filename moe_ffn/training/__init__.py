"""Training with Lightning: the only room that imports it.

What is minimised, and how:
    module.py           the LightningModule
    objective.py        cross-entropy and balancing losses; masking.py: which tokens are guessed
    optimizer_config.py the optimizers and their options; optimizer.py: groups, and what a resumed run obeys
    muon.py             Muon over stacked experts; schedule_config.py: the learning rate over the steps
    precision.py        the number format of a device
    steering.py         biases and weights that move between steps; step_totals.py: what a whole step counted
    loaders.py          batches by their number; data_module.py hands them to the Trainer

What is observed, from batch to reader:
    routing_by_layer.py one set of metrics per sparse layer
    routing_window.py   those of a row of training, dead experts, biases; probe.py: churn
    callbacks.py        rows of training and of validation; rows.py: their keys
    alarms.py           what calls for attention; alarm_bell.py: who hears it
    progress.py         what a person sees meanwhile
    metrics_file.py     rows as a CSV; json_lines.py: alarms and samples
    loggers.py          what is done with all loggers
    wandb_run.py        wandb, which never stands in the way; wandb_row.py, load_figure.py: what it draws

What is left when a run dies:
    checkpoint_keeper.py when it is saved, and which checkpoints stay
    checkpoint_file.py  one of them, sealed with its checksum; checkpoint_folder.py: their names
    stopping.py         a signal ends the run after its step
    guard.py            which steps are skipped, and when that is too much; blame.py: where NaN began
    outage.py           what is said of a disk that cannot be written

    config.py           the options of all of them
"""
