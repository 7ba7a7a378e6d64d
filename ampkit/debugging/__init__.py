"""When numbers go wrong: which operator, which module, which line, why, and the smallest change that helps."""
