"""Files for runtimes: one format, one file, each with ``export`` and ``read``."""
