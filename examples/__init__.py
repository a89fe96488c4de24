"""Complete trainings on trajstore and trainer_hooks, outside the wheel. ``python -m examples.demo`` starts them.

``grpo`` trains a small language model with experience replay; ``cartpole`` trains a double DQN from a replay buffer;
``agentevolver`` is a module to copy, with AgentEvolver's names.
Needs the extra ``demo``.
"""
