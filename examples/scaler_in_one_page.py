"""A gradient scaler on one page: scale the loss, unscale and check the gradients, skip the step, adjust the scale.

Written for reading; docs/how-it-works.md lists the additions of ampkit to each part, and their files.
"""

import torch


class GradScaler:
    """Keeps small gradients representable in float16, and skips steps whose gradients are not finite."""

    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.loss_scale, self.clean_updates = torch.tensor(init_scale), 0
        self.found_inf = {}  # this iteration's optimizers whose gradients are unscaled: were they not all finite?

    def scale(self, loss):
        """Return the loss, multiplied: backward multiplies each gradient by the same factor."""
        return loss * self.loss_scale

    def unscale_(self, optimizer):
        """Divide the optimizer's gradients by the scale, in place, and check them for inf and NaN."""
        if optimizer in self.found_inf:
            raise RuntimeError("unscale_ was called twice between updates, which would divide the gradients twice")
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads = [param.grad for param in params if param.grad is not None]
        self.found_inf[optimizer] = not all(torch.isfinite(grad).all() for grad in grads)
        for grad in grads:
            grad.mul_(self.loss_scale.reciprocal())

    def step(self, optimizer):
        """Call `optimizer.step()` if all of its gradients are finite."""
        if optimizer not in self.found_inf:
            self.unscale_(optimizer)
        if not self.found_inf[optimizer]:
            optimizer.step()

    def update(self):
        """Adjust the scale: down at an overflow, up after a run of updates without one. Begins the next iteration."""
        if any(self.found_inf.values()):
            self.loss_scale, self.clean_updates = self.loss_scale * self.backoff_factor, 0
        else:
            self.clean_updates += 1
            if self.clean_updates == self.growth_interval:
                self.loss_scale, self.clean_updates = self.loss_scale * self.growth_factor, 0
        self.found_inf = {}


def main():
    """Train with a scale that is too large at first; returns the scales and the last loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), GradScaler(2.0**24, growth_interval=8)
    x, y, scales = torch.randn(64, 8), torch.randint(4, (64,)), []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(int(scaler.loss_scale))
    print(f"scale {scales[0]}, at the end {scales[-1]}; loss {loss:.3f}")
    return scales, loss.item()


if __name__ == "__main__":
    main()
