"""Training: the step here, `monitoring` observes it, `recovery` survives what interrupts it.

module.py           the LightningModule
objective.py        what is minimised, and what is updated between steps without a gradient
optimizer.py        the optimizers and their options; schedule.py
data_module.py      batches by their number, as Lightning's loaders
sampling.py         a text of the model
config.py           the options of the Trainer, of logging and of checkpoints
"""

from moe_ffn.training.optimizer import MuonConfig, OptimizerConfig

__all__ = ["MuonConfig", "OptimizerConfig"]
