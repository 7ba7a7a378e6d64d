"""Records of casts: `record_casts` (`recording`) and its report (`cast_record`, `float8_losses`)."""
