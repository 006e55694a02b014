"""Tables of plans and scores."""
