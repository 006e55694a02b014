"""nn.Modules that sit on a site."""
