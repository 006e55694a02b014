"""One pass over the data that gives every site its encoding, and says what its width does not hold."""
