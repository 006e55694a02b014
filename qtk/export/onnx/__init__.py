"""ONNX files with QuantizeLinear and DequantizeLinear pairs."""
