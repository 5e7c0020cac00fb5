"""The six synthetic tasks of MAD: recall (plain, noisy, fuzzy), selective copying, compression, memorisation.

data = mad.generate(mad.baseline("in-context-recall"))
data.train_inputs, data.train_targets      # int64 [12800, 127]; -100 marks targets that do not count
for inputs, targets in torch.utils.data.DataLoader(data.train, batch_size=128, shuffle=True): ...
"""

from __future__ import annotations

from efla.experiments.mad.dataset import SEED, MadData, generate
from efla.experiments.mad.published_data import load
from efla.experiments.mad.settings import IGNORE, TASKS, Setting, baseline, changed, sweep

__all__ = ["IGNORE", "SEED", "TASKS", "MadData", "Setting", "baseline", "changed", "generate", "load", "sweep"]
