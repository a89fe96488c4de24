"""A small resumable double DQN learner on the CPU, trained from replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class DQNSettings:
    """Hyperparameters.

    Attributes:
        hidden: width of both hidden layers.
        learning_rate: of Adam.
        discount: per step.
        target_rate: interpolation rate of the target's weights toward the online ones, after every update.
        max_grad_norm: gradients are scaled down to this norm.
    """

    hidden: int = 128
    learning_rate: float = 1e-3
    discount: float = 0.99
    target_rate: float = 0.05
    max_grad_norm: float = 10.0


@dataclass(frozen=True, slots=True)
class Update:
    """Result of one gradient step.

    Attributes:
        loss: mean over the batch, weighted.
        errors: absolute TD error of each transition, float32 ``[n]``: its new priority.
    """

    loss: float
    errors: torch.Tensor


class DQNLearner:
    """Action values of two networks, of which the second slowly follows the first.

    The target is ``r + discount * Q_target(s', argmax_a Q(s', a))``, without the second term where the episode
    terminated (van Hasselt et al., "Deep Reinforcement Learning with Double Q-learning", 2016). A truncated episode did
    not terminate: its last state has a value.
    """

    def __init__(
        self, observations: int, actions: int, generator: torch.Generator, settings: DQNSettings | None = None
    ) -> None:
        self.settings = settings or DQNSettings()
        self.actions = actions
        self.updates = 0
        """Gradient steps so far; the version of the weights."""
        self._network = _network(observations, self.settings.hidden, actions, generator)
        self._target = _network(observations, self.settings.hidden, actions, generator)
        self._target.load_state_dict(self._network.state_dict())
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=self.settings.learning_rate)

    @torch.no_grad()
    def act(self, states: torch.Tensor, exploration: float, generator: torch.Generator) -> torch.Tensor:
        """Return actions ``[B]`` int64 for states ``[B, observations]``: random with probability ``exploration``."""
        best = self._network(states).argmax(dim=-1)
        count = states.shape[0]
        at_random = torch.randint(self.actions, (count,), generator=generator)
        explore = torch.rand(count, generator=generator) < exploration
        return torch.where(explore, at_random, best)

    def update(self, batch: Mapping[str, Any], weights: torch.Tensor | None = None) -> Update:
        """Take one gradient step on a batch as ``TrajectoryReplayBuffer.sample`` returns it.

        Args:
            batch: ``curr_obs.states`` and ``next_obs.states`` ``[n, observations]``, ``actions`` ``[n, 1]``
                int64, ``rewards`` ``[n, 1]`` float32, ``terminations`` ``[n, 1]`` bool.
            weights: importance weight of each transition, ``[n]``; None = 1.
        """
        following = batch["next_obs"]["states"]
        with torch.no_grad():
            best = self._network(following).argmax(dim=-1, keepdim=True)
            value = self._target(following).gather(-1, best)
            wanted = batch["rewards"] + self.settings.discount * value * ~batch["terminations"]
        predicted = self._network(batch["curr_obs"]["states"]).gather(-1, batch["actions"])
        losses = functional.smooth_l1_loss(predicted, wanted, reduction="none")[:, 0]
        loss = (losses if weights is None else losses * weights).mean()
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._network.parameters(), self.settings.max_grad_norm)
        self._optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self._target.parameters(), self._network.parameters(), strict=True):
                slow.lerp_(fast, self.settings.target_rate)
        self.updates += 1
        return Update(loss.detach().item(), (predicted.detach() - wanted).abs()[:, 0])

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, for resuming."""
        return {
            "network": self._network.state_dict(),
            "target": self._target.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self._network.load_state_dict(state["network"])
        self._target.load_state_dict(state["target"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])


def _network(inputs: int, hidden: int, outputs: int, generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size, width in ((inputs, hidden), (hidden, hidden), (hidden, outputs)):
        # nn.Linear would draw from the global generator; the range is nn.Linear's.
        layer = nn.Linear(size, width, device="meta").to_empty(device="cpu")
        bound = size**-0.5
        nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
        nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
