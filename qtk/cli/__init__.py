"""The command line: ``qtk quantize``, ``qtk inspect``, ``qtk export``."""
