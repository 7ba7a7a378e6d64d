"""When operators are cast: entering and leaving regions. `dispatch` casts the operators of an open region.

There are four ways in:

- `with autocast(...)` or the decorator: `autocast`, whose arguments `arguments` checks, and `decorate`;
- a rule for a module: `module_hooks`;
- a recomputed forward: `checkpoint`;
- a compiled graph: `compiled`.

All of them call `stack.enter`, which reads the state that a region changes and then writes it; `stack.leave` writes
that state back. `custom_function` has `custom_fwd` and `custom_bwd`.
"""
