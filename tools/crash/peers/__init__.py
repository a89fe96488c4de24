"""The same kills for several stores of rollouts: acknowledged rollouts that are lost, read twice or changed."""
