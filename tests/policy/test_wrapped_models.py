"""Rules bound to a model apply or are reported, whatever wraps or changes the model after binding, or before."""

import copy
import functools
import pickle
import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ampkit import Policy, autocast, record_casts
from tests.helpers.module_rules import Block, Model, X
from tests.helpers.ranks import on_ranks
from tests.helpers.regions import BF16, FP32

KEYS = {"**.head": FP32, "**.blocks.1": FP32}  # fit the model and whatever is around it
BOUND = {"blocks.1.attn", "blocks.1.mlp", "head"}
ADAPTER = {"head.lora_A.default", "head.lora_B.default"}


def lora(model):
    """The head is replaced by a module that contains it beside an adapter."""
    peft = pytest.importorskip("peft", reason="it is in ampkit[dev]")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["head"]))


def quantized(model):
    model.head = nn.Linear(4, 4)
    return model


def loads(model, state_dict):
    model.load_state_dict(state_dict)
    return model


def checkpointed(model):
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    return model


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def fsdp2(model):
    for module in (*model.blocks, model):
        fully_shard(module)
    return model


HERE = {
    "Sequential": nn.Sequential,
    "DataParallel": nn.DataParallel,
    "checkpoint": checkpointed,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "compile in place": compiled_in_place,
    "deep copy": copy.deepcopy,
    "moving average": AveragedModel,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "a checkpoint loaded": lambda model: loads(model, Model().state_dict()),
    "a checkpoint loaded by another": lambda model: loads(Model(), model.state_dict()),
    "peft": lora,
    "quantization": quantized,
}
ON_RANKS = {
    "DDP": DistributedDataParallel,
    "FSDP1": lambda model: FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
    ),
    "FSDP2": fsdp2,
}
# The modules that rules bound before do not reach.
MISSED = {
    "a checkpoint loaded by another": BOUND,
    "peft": ADAPTER,  # the layer beside it is the one that was bound
    "quantization": {"head"},
}


def note(seen, path, module, args, out):
    """A forward hook."""
    if out.dtype is FP32:
        seen.add(path)


def in_float32(around, policy):
    """The layers that computed in float32 in a training step, by their paths in the model."""
    seen = set()
    for name, module in around.named_modules():
        if isinstance(module, nn.Linear):
            path = re.sub(
                r".*?(blocks\.\d|head)",
                r"\1",
                name.replace("_checkpoint_wrapped_module.", "").replace("_fsdp_wrapped_module.", ""),
                count=1,
            )
            module.register_forward_hook(functools.partial(note, seen, path))
    with autocast("cpu", BF16, policy=policy):
        loss = around(X).float().sum()
    loss.backward()
    return seen


def outcome(wrap, when):
    """The layers in float32, and the rules with modules that are gone."""
    model, policy = Model(), Policy.default("cpu")
    if when != "after":
        policy = policy.for_modules(model, KEYS)
    if when == "in training":
        with autocast("cpu", BF16, policy=policy):
            model(X)
    around = wrap(model)
    if when == "after":
        policy = policy.for_modules(around, KEYS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = in_float32(around, policy)
    return layers, [rule.key for rule in policy.check().removed]


def on_rank(rank, world, kind, when):
    return outcome(ON_RANKS[kind], when)


@pytest.mark.parametrize("when", ["before", "in training", "after"])
@pytest.mark.parametrize("kind", [*HERE, *ON_RANKS])
def test_rules_hold_or_check_reports_them(kind, when):
    """Bound before the model is wrapped, or a region has run it too by then, or bound after."""
    if kind in ON_RANKS:
        assert on_ranks(on_rank, kind, when) == [(BOUND, [])] * 2
        return
    layers, gone = outcome(HERE[kind], when)
    every = BOUND - {"head"} | {"head.base_layer"} | ADAPTER if kind == "peft" else BOUND
    assert layers == every - (set() if when == "after" else MISSED.get(kind, set()))
    assert gone == (["'**.head'"] if kind == "quantization" and when != "after" else [])


def test_wrappers_have_no_part_in_the_paths_of_records():
    """The paths are those of the modules as they are now."""

    def paths(around):
        with record_casts() as record, autocast("cpu", BF16):
            around(X)
        return [call.module for call in record.calls if "norm" not in call.op]

    model = checkpointed(Model())
    layers = [f"blocks.{block}.{layer}" for block in range(3) for layer in ("attn", "mlp")]
    assert paths(model) == paths(nn.DataParallel(model)) == [*layers[:4], "head"]
    model.blocks.insert(0, Block())
    model.head = nn.Linear(4, 4)
    assert paths(model) == [*layers, "head"]


def test_a_module_that_moves_has_its_new_path_in_records():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    for expected in ([3, 2], [2, 3]):
        with record_casts() as record, autocast("cpu"):
            model(X)
        assert [(call.module, len(call.operands)) for call in record.calls] == list(zip("01", expected, strict=True))
        model[0], model[1] = model[1], model[0]
