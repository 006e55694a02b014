"""Layer-wise methods: the walk through the graph, what it gathers, the methods, checkpoints and the report."""
