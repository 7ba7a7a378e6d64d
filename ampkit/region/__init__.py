"""Regions: `autocast`, the dispatch mode under it, the casts, the weight cache, and where regions must follow."""
