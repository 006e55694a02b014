"""From statistics to encodings."""
