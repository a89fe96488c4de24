"""Sessions of agents: trees of calls of a model, durable call by call, and the rollouts made of them."""
