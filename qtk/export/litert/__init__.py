"""LiteRT files (``.tflite``), written by the package litert-torch and read by the schema of ai-edge-litert."""
