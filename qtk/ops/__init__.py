"""torch.library ops: schema, fake kernel, autograd, backends."""
