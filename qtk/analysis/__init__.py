"""The values of sites and outputs, in float and as simulated, and what each error costs."""
