"""The checkpoints of Hugging Face's compressed-tensors, which vLLM, SGLang and transformers load."""
