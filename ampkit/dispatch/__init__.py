"""How an open region changes one operator. `policy` has the rules, `region` enters and leaves regions.

The path of `F.linear`, from the call to the cast, is in two files:

1. `handlers`: torch's dispatcher calls the operator's handler, a closure made at the operator's first call for its
   rule (`_casting_handler`). It casts the arguments and calls the operator below the region's dispatch key.
2. `weight_cache`: `WeightCasts.getter` reuses the casts of weights until the outermost region ends.

The rest:

- `dispatcher`: the dispatch keys of regions, and the registration of a function for an operator;
- `casting`: casts of arguments, and `recurrent`: cuDNN's layout of weights;
- `mode`: the state that operators read, and every rule in one place;
- `dynamo_guard`: compiles again for another policy; `self_check`: tests that torch calls a region's handlers.
"""
