"""The private names of torch: every module that uses one imports it from here."""
