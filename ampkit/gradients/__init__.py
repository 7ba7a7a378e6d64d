"""Code that scalers, optimizers and master weights share: gradients as lists, clipping, ranks, contracts of `step`."""
