"""Training: the step here, `monitoring` observes it, `recovery` survives what interrupts it.

module.py           the LightningModule
objective.py        what is minimised: cross-entropy, and the weighted balancing losses
optimizer.py        the optimizers and their options; muon.py, schedule.py
steering.py         biases and weights that move between steps
data_module.py      batches by their number, as Lightning's loaders
sampling.py         a text of the model
config.py           the options of the Trainer, of logging and of checkpoints
"""

# The family of optimizers is whole once any part of this package is imported.
from moe_ffn.training.muon import MuonConfig
from moe_ffn.training.optimizer import OptimizerConfig

__all__ = ["MuonConfig", "OptimizerConfig"]
