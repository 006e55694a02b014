"""AIMET's formats: encodings in its schemas, and the tensor names that they use."""
