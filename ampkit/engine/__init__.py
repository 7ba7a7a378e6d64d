"""What happens to one operator in a region: the handler registered for it, its casts, the cache of weight casts."""
