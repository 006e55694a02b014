"""One verb, one file: prepare, calibrate, check, compare, export, store."""
