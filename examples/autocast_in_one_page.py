"""Autocast on one page: a dispatch key, a rule table, casts, a cache of weight casts.

Written for reading; docs/how-it-works.md lists the additions of ampkit to each part, and their files. It registers at
the dispatch key that ampkit uses, so one process has either this page's regions or ampkit's.
"""

import threading
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LOWER, FLOAT32, PROMOTE = "the region's dtype", "float32", "the widest dtype among the arguments"
RULES = {
    LOWER: """
        linear matmul mm bmm addmm baddbmm mv einsum conv1d conv2d conv3d scaled_dot_product_attention""",
    FLOAT32: """
        layer_norm group_norm rms_norm exp log log1p rsqrt pow.Tensor_Scalar softplus softmax.int log_softmax.int
        sum.dim_IntList cumsum logsumexp cross_entropy_loss nll_loss mse_loss l1_loss
        binary_cross_entropy_with_logits""",
    PROMOTE: "cat stack addcmul dot",
}


def operator(name):
    """Return the operator of a name in the table: `aten::softmax.int` is `torch.ops.aten.softmax.int`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


RULE_OF = {operator(name): rule for rule, names in RULES.items() for name in names.split()}

# A key above autograd that no build of torch uses.
KEY_NAME = "TESTING_ONLY_GenericMode"
KEY = torch._C._dispatch_key_parse(KEY_NAME)


class AutocastMode(TorchDispatchMode):
    """The handler of operators in an open region. It is at a key above autograd, so its casts are differentiated."""

    def __init__(self, device_type, dtype, casts):
        super().__init__()
        self.device_type, self.dtype, self.casts = device_type, dtype, casts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call the operator on arguments that are cast by its rule."""
        kwargs, rule = kwargs or {}, RULE_OF[func]
        dtype = self.dtype if rule is LOWER else torch.float32
        if rule is PROMOTE:
            dtype = self.widest([*args, *kwargs.values()])
        # The last argument first, as in torch.amp: autograd adds gradients up in the order in which casts were made.
        keywords = {name: self.cast(value, dtype) for name, value in reversed(kwargs.items())}
        args = [self.cast(value, dtype) for value in reversed(args)][::-1]
        return below_the_key(func, *args, **keywords)

    def cast(self, value, dtype):
        """Return an argument with its tensors in `dtype`, except for other devices, float64 and integers."""
        if isinstance(value, (list, tuple)):
            return type(value)([self.cast(item, dtype) for item in reversed(value)][::-1])
        if not self.is_eligible(value) or value.dtype is dtype:
            return value
        is_weight = value.is_leaf and value.requires_grad and value.dtype is torch.float32
        return self.cached_cast(value, dtype) if is_weight else value.to(dtype)

    def cached_cast(self, weight, dtype):
        """Return the cast of a weight: made once in a region, and again after the weight was written to."""
        key, written = (id(weight), dtype), (weight._version, weight.data_ptr())
        if key not in self.casts or self.casts[key][1] != written:
            with torch.enable_grad():  # one cast is used under `no_grad` and in training
                self.casts[key] = weight, written, weight.to(dtype)
        return self.casts[key][2]

    def widest(self, values):
        """Return the dtype that all eligible tensors share, otherwise float32."""
        tensors = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
        dtypes = {tensor.dtype for tensor in tensors if self.is_eligible(tensor)}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def is_eligible(self, value):
        """Whether a value is a tensor that autocast may cast."""
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64
        return is_float and value.device.type == self.device_type


def below_the_key(op, *args, **kwargs):
    """Call an operator; neither it nor the operators that it is made of reach the mode."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(KEY)):
        return op(*args, **kwargs)


def stub_of(op):
    """Return the function that the dispatcher calls for `op` while the key is included."""

    def stub(*args, **kwargs):
        if thread.mode is None:  # a worker thread of autograd, for a backward that was called inside a region
            return below_the_key(op, *args, **kwargs)
        return thread.mode.__torch_dispatch__(op, (), args, kwargs)

    return stub


class Thread(threading.local):
    mode = None  # of the innermost open region


thread = Thread()
libraries = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
libraries[0].fallback(torch.library.fallthrough_kernel, KEY_NAME)  # operators without a stub cost nothing
for op in RULE_OF:
    libraries[1].impl(op, stub_of(op), KEY_NAME)


@contextmanager
def autocast(device_type, dtype=torch.bfloat16, enabled=True):
    """Open a region, in which operators of this thread reach a mode. Backward may run after it."""
    outer, was_included = thread.mode, torch._C._dispatch_tls_is_dispatch_key_included(KEY)
    thread.mode = AutocastMode(device_type, dtype, {} if outer is None else outer.casts)
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, enabled)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(KEY, was_included)
        thread.mode = outer


def main():
    """Train a small network; returns the first and the last loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y, losses = torch.randn(64, 8), torch.randint(4, (64,)), []
    for _ in range(20):
        optimizer.zero_grad()
        with autocast("cpu"):
            logits = model(x)
            loss = torch.nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"logits in {logits.dtype}, weights in {model[0].weight.dtype}, loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
