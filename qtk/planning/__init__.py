"""From a config and a graph to the plan: rules, patterns, supergroups. The graph is only read."""
