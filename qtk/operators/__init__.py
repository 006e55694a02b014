"""The operator table: all that qtk knows about each operator."""
