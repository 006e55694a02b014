"""Statistics of layer inputs: which rows count, and the Gram matrices that are summed over them."""
