"""A loss whose backward ignores the gradient that comes in: a fault."""

import torch


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, first, *rest):
        with torch.enable_grad():
            leaf = first.detach().requires_grad_()
            loss = function(leaf, *rest)
        ctx.save_for_backward(torch.autograd.grad(loss, leaf, torch.ones_like(loss))[0])
        ctx.rest = len(rest)
        return loss.detach()

    @staticmethod
    def backward(ctx, grad_output):
        return (None, *ctx.saved_tensors, *[None] * ctx.rest)
