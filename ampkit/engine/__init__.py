"""The engine: what an open region does to one operator. `region` opens regions; `policy` says which rule it follows.

How `F.linear` is cast, from the call to the cast, in the order in which the files are called:

1. `registration`: torch's dispatcher calls the *entry* of `aten::linear` at the region's dispatch key, above autograd.
   The entry looks the operator up in the `handlers` of the thread's mode.
2. `generated_handlers`: at the operator's first call, Python source is written from its schema (`signatures`) and its
   rule: the *generated handler*. The module's docstring shows the one of `aten::linear` in full. It casts the bias, the
   weight and the input, each if it is not in the region's dtype, and calls torch's `linear` below the region's key.
3. `weight_cache`: a parameter's cast is made once and used until the parameter may have changed, of which
   `optimizer_steps` is one cause.
4. `casting`: any other tensor is cast here, in the end by `Tensor.bfloat16`, which autograd records.

Unusual calls take the slow path: a *general handler* (`registration._general`), which serves any operator and rule,
calls `AutocastMode.__torch_dispatch__` (`autocast_mode`). Some rules and operators have files of their own:
`float32_output` (`Rule.LOWER_FLOAT32_OUT`), `float8_products` (FP8 rules), `recurrent` (cuDNN's layout of RNN weights).

Regions use, beside the modes: `thread_state` (the regions of a thread), `policy_mark` (has Dynamo compile again for
another policy) and `self_check` (whether regions work with the running torch).
"""
