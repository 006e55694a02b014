"""Operators of ``torch.library``; ``registration`` registers each by schema, reference, fake, kernels and gradient."""
