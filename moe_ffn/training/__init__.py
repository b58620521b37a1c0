"""Training. `monitoring` logs a run; `recovery` handles checkpoints, skipped steps and early ends; `parallel`
trains on several devices.

module.py           the LightningModule
objective.py        the loss, and the biases and weights that are updated without a gradient
optimizer.py        optimizers and their options
schedule.py         learning rate schedules
data_module.py      the data loaders
evaluation.py       loss and routing of a trained model on a text
sampling.py         text generation during and after training
strategy.py         Lightning's strategy for sharded models
config.py           options of the Trainer, of logging and of checkpoints
"""

from moe_ffn.training.optimizer import MuonConfig, OptimizerConfig

__all__ = ["MuonConfig", "OptimizerConfig"]
