"""torch.distributed.checkpoint: `LoadPlanner`, for checkpoints that lack state which only ampkit saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan

from ampkit.scaler.saved_state import OWN_KEY, TORCH_KEYS

__all__ = ["LoadPlanner"]

_STRATEGY = "loss_scale"
_OF_WEIGHTS = ("remainder", "stream")  # entries of an optimizer's state that no optimizer of torch has


class LoadPlanner(DefaultLoadPlanner):
    """torch's `DefaultLoadPlanner`, which also loads checkpoints of torch's scaler and optimizers into ampkit's.

    `dcp.load` loads the entries that `state_dict()` returns before the load, and raises if the checkpoint lacks an
    entry. Three kinds of entries may be absent with this planner, if the checkpoint has none of that kind for that
    object:

    - ampkit's entry of a scaler, in a checkpoint of `torch.amp.GradScaler`: the counts of `stats` start at 0;
    - remainders, in a checkpoint of an optimizer without `masters`: set to 0, masters begin as the weights;
    - streams of random numbers, in one of an optimizer without stochastic rounding: they are unchanged.

    A scaler's strategy may be of another kind, as in a float16 run that continues in bfloat16: the scaler keeps its
    own, with a warning, as `GradScaler.load_state_dict` does.

    Anything else that is absent raises, as without this planner; `allow_partial_load=True` would keep new weights
    without saying so.

    Args:
        flatten_state_dict: as of torch's; without it nothing may be absent.
        flatten_sharded_tensors: as of torch's.

    Use it as `dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())`.
    """

    def __init__(self, flatten_state_dict: bool = True, flatten_sharded_tensors: bool = True) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors)

    def create_local_plan(self) -> LoadPlan:
        """Plan the load without the entries that may be absent. DCP calls this.

        Returns:
            torch's plan.

        Raises:
            RuntimeError: the checkpoint lacks another entry.
        """
        saved = set(self.metadata.state_dict_metadata) if self.metadata is not None else set()
        self._take_saved_strategies(saved)
        absent = {name: self._kind(path) for name, path in self.mappings.items() if name not in saved}
        present = {kind for kind in set(absent.values()) if kind and any(_is_of(name, kind) for name in saved)}
        for name, kind in absent.items():
            if kind is None or kind in present:
                continue
            value = self.state_dict.pop(name)
            *parent, last = self.mappings[name]
            if kind[1] == OWN_KEY:  # `load_state_dict` of the scaler gets the entries of torch's
                self._at(parent[: parent.index(OWN_KEY)]).pop(OWN_KEY, None)
            elif str(last).endswith("remainder") and isinstance(value, Tensor):
                with torch.no_grad():
                    value.zero_()
        return super().create_local_plan()

    def _take_saved_strategies(self, saved: set[str]) -> None:
        """Load each scaler's strategy with the entries that the checkpoint has, which depend on its kind."""
        for path in {path[:-1] for path in self.mappings.values() if path[-2:-1] == (_STRATEGY,)}:
            if path[-2:-1] != (OWN_KEY,) or self._kind(path) is None:
                continue
            prefix = f"{_joined(path)}."
            names = [name.removeprefix(prefix) for name in saved if name.startswith(prefix)]
            if not names:  # torch's checkpoint
                continue
            for name in [name for name, of in self.mappings.items() if of[:-1] == path]:
                del self.mappings[name], self.state_dict[name]
            self._at(path[:-1])[_STRATEGY] = dict.fromkeys(names)
            for name in names:
                self.mappings[prefix + name], self.state_dict[prefix + name] = (*path, name), None

    def _kind(self, path: tuple[Any, ...]) -> tuple[str, str] | None:
        """Return the path of an entry's object and the kind of the entry; None if it may not be absent."""
        if OWN_KEY in path:
            owner = path[: path.index(OWN_KEY)]
            state = self._at(owner)
            return (_joined(owner), OWN_KEY) if isinstance(state, Mapping) and state.keys() >= {*TORCH_KEYS} else None
        # Optimizers: {"state": {"layer.weight": {"remainder": ...}}, "param_groups": ...}, or
        # flat: {"state.layer.weight.remainder": ..., "param_groups.layer.weight.lr": ...}.
        name = str(path[-1]).rpartition(".")[2]
        is_flat = name != path[-1]
        owner = path[:-1] if is_flat else path[:-3]
        if name not in _OF_WEIGHTS or not str(path[len(owner)]).startswith("state"):
            return None
        is_optimizer = any(str(key).startswith("param_groups") for key in self._at(owner))
        return (_joined((*owner, "state")), name) if is_optimizer else None

    def _at(self, path: Any) -> Any:
        """Return the object at a path of the nested state."""
        found: Any = self.original_state_dict
        for key in path:
            found = found[key]
        return found


def _joined(path: tuple[Any, ...]) -> str:
    """Return a path as DCP writes it."""
    return ".".join(map(str, path))


def _is_of(name: str, kind: tuple[str, str]) -> bool:
    """Return whether an entry of a checkpoint is of this kind and object."""
    owner, what = kind
    if what == OWN_KEY:
        return name.startswith(f"{owner}.{OWN_KEY}." if owner else f"{OWN_KEY}.")
    return name.startswith(f"{owner}.") and name.endswith(f".{what}")
