"""Quantization configs: schema, validation and loading of YAML and AIMET JSON files."""
