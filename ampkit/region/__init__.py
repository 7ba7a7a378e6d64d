"""Regions: when operators are cast, from entering `autocast` to leaving it. `engine` has how one operator is cast.

**Eager.** `with autocast(...):` runs, in this order:

1. `autocast.__init__` in `autocast`: `checked_spec` in `arguments` checks the arguments and makes a `RegionSpec`.
2. `autocast.__enter__`: `push` in `stack`. It makes an `Entry`, which reads the state to restore and chooses the weight
   cache and the mode (`new_mode` in `recording` makes a mode), then writes: the mode and the policy's mark, the
   dispatcher key, and torch's autocast flags.
3. Only if the policy has rules for modules: `begin_module_rules` in `module_hooks` registers global hooks. They run
   around each module, and `module_regions` says which region a rule asks for; the hooks `push` that.
4. `autocast.__exit__`: `pop` in `stack`, and `Entry.leave`, which restores the state. If an interrupt cut an enter or a
   leave short, the next region that is entered or left in the thread completes it.

**Compiled.** Operators are cast as in eager code. These places differ (docs/compile.md has the effects):

- Entering and leaving: while Dynamo traces, `autocast.__enter__` and `__exit__` call `enter_in_trace` and
  `leave_in_trace` in `traced`, and the hooks of step 3 `before_forward_in_trace` and `after_forward_in_trace`. These
  put calls of `enter_region` and `leave_region` into the graph, which push and leave the region as the graph runs.
- Guards: `engine.policy_mark` makes Dynamo compile again under another policy, and traces backward without autocast.
- Weights: their casts are part of the graph; `engine.weight_cache` returns and keeps none while tracing.
- Export: `engine.registration` has pre-dispatch tracing record the casts (`_before_tracer`).

**Other ways in.** `decorate` has functions, generators and coroutines; `forward_wrapper` (`wrap_forward`) the forward
of a module; `custom_function` (`custom_fwd`, `custom_bwd`) autograd functions. A checkpoint's recompute enters by
`_recomputing` in `stack`.

**Records.** `recording` (`record_casts`) gives regions a mode that notes each call in a `CastRecord` of `cast_record`;
`float8_losses` has the rounding losses of FP8.
"""
