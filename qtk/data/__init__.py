"""A user's data: how batches reach a model, which of their tokens count, and what a call hands to the next."""
