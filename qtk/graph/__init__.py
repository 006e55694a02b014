"""The only code that touches torch.fx nodes: capture, names, plan, insertion."""
