"""What scalers, optimizers and master weights share: gradients as lists, their kernels, the contracts of `step`."""
