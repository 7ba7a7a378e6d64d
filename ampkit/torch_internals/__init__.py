"""Names of torch that it does not promise. Every module of ampkit that uses one imports it from here.

- Lookup: `private_names` finds a name, or notes that this torch lacks it; `versions` has the supported versions.
- Operators: `operators` (registries, schemas), `dispatcher` (keys, guards, the thread-local store), `transforms`
  (`torch.func`), `operator_tracing` (modes that observe, autograd nodes, storages).
- Tensors: `tensors` (tracing, storages, collectives), `float8_matmul`.
- Around regions: `dynamo`, `checkpoint`, `modules` (global hooks), `optimizers`, `forks` (locks across `os.fork`).

`private_names.looked_up` lists the names of torch that are looked up by path; docs/architecture.md lists all.
"""
