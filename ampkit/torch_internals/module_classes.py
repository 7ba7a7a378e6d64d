"""Private base classes of torch's normalisation layers, for `isinstance`."""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm

__all__ = ["BatchNorm", "InstanceNorm"]
