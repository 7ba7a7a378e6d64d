"""Observes a training run, and decides nothing: operators, calls of the loop, modules, lines, storages, a tape."""
