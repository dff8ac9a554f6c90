"""Workers of ranks that share one model: the leader computes its part and gives orders, and followers obey them."""
