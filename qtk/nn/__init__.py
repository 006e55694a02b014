"""Float modules that replace captured ops: dropout, norms, attention and recurrent nets."""
