"""TextWorld's challenge *Treasure Hunter* as an environment: its generator makes the games, its engine plays them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import Any

from examples.grpo.environments import Answer, Environment, Episode, TextTask
from trajstore.errors import ConfigurationError, MissingDependencyError


class TreasureEnvironment(Environment):
    """Multi-turn: walk through a house of TextWorld and take the wanted thing; to take the other thing loses the game.

    Each house has one game for each length of a quest. The model reads the quest's last command and, before each reply,
    the room and the commands that have an effect there. Other replies change nothing. Levels number the lengths. The
    same arguments give the same games.

    Raises:
        MissingDependencyError: textworld is not installed.
    """

    name = "treasure"

    def __init__(
        self, houses: int = 8, rooms: int = 8, quest_lengths: Sequence[int] = (2, 3, 4), max_turns: int = 5
    ) -> None:
        if houses < 1:
            raise ConfigurationError(f"houses: {houses}, must be at least 1")
        if not quest_lengths or min(quest_lengths) < 1 or max(quest_lengths) > min(rooms, max_turns):
            raise ConfigurationError(
                f"quest_lengths: {list(quest_lengths)}, each must be in [1, {min(rooms, max_turns)}]"
            )
        try:
            import textworld  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError("textworld", "bench") from error
        self.max_turns = max_turns
        self._games: dict[str, _Game] = {}
        tasks = []
        for level, length in enumerate(sorted(quest_lengths), 1):
            for house in range(houses):
                game = _make_game(house, rooms, length)
                tasks.append(TextTask(f"treasure-{house}-{length}", level, tuple(game.goal.split())))
                self._games[tasks[-1].task_id] = game
        self.tasks = tuple(tasks)
        states = [state for game in self._games.values() for state in game.states.values()]
        texts = {*(state.view for state in states), *(game.goal for game in self._games.values())}
        self.words = ("goal", *sorted({word for text in texts for word in text.split()}))
        self.max_reply_tokens = 1 + max(len(command.split()) for state in states for command in state.commands)

    def begin(self, task: TextTask) -> Episode:
        return _TreasureEpisode(self._games[task.task_id], self.max_turns)


class _TreasureEpisode(Episode):
    def __init__(self, game: _Game, turns: int) -> None:
        self._state = game.first
        self._turns = turns
        self.first_message = f"goal {game.goal} {self._state.view}"

    def answer(self, reply: str) -> Answer:
        self._state = state = self._state.commands.get(reply, self._state)
        self._turns -= 1
        return Answer(state.view, done=state.over or self._turns == 0, reward=float(state.won))

    def any_reply(self, random: Random) -> str:
        return random.choice(list(self._state.commands))


class _State:
    """A state of a game.

    Attributes:
        won, over: by the engine's judgement.
        view: the room and the commands.
        commands: commands that have an effect -> the state after it; none in a game that is over.
    """

    def __init__(self, game: _Game, progression: Any) -> None:
        self.won = bool(progression.completed)
        self.over = self.won or bool(progression.failed)
        self.commands: dict[str, _State] = {}
        game.states[frozenset(progression.state.facts)] = self
        if not self.over:
            actions = [action for action in progression.valid_actions if action.added or action.removed]
            commands = game.inform.gen_commands_from_actions(actions)
            for command, action in sorted(zip(commands, actions, strict=True), key=lambda pair: str(pair[0])):
                after = progression.copy()
                after.update(action)
                self.commands[str(command)] = game.state(after)
        (player,) = (fact for fact in progression.state.facts if fact.name == "at" and fact.arguments[0].type == "P")
        self.view = " ".join(["in", game.infos[player.arguments[1].name].name, *self.commands])


class _Game:
    """A game with all of its states, because the engine takes milliseconds for a command."""

    def __init__(self, game: Any) -> None:
        from textworld.generator.game import GameProgression
        from textworld.generator.inform7 import Inform7Game

        self.inform = Inform7Game(game)
        self.infos = game.infos
        self.goal = str(game.quests[0].commands[-1])
        self.states: dict[frozenset[Any], _State] = {}
        self.first = self.state(GameProgression(game))

    def state(self, progression: Any) -> _State:
        """Return the state with these facts."""
        return self.states.get(frozenset(progression.state.facts)) or _State(self, progression)


@lru_cache(maxsize=256)
def _make_game(house: int, rooms: int, length: int) -> _Game:
    from textworld.challenges.tw_treasure_hunter.treasure_hunter import make_game
    from textworld.generator.game import GameOptions

    options = GameOptions()
    options.seeds, options.nb_rooms, options.quest_length, options.kb = house, rooms, length, _knowledge()
    return _Game(make_game("easy", options))


@lru_cache(maxsize=1)
def _knowledge() -> Any:
    """Return the rules and words of the challenge, which take seconds to read."""
    from textworld.challenges.tw_treasure_hunter.treasure_hunter import KB_PATH
    from textworld.generator.data import KnowledgeBase

    return KnowledgeBase.load(KB_PATH)
