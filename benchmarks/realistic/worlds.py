"""Small worlds to act in, many side by side: cart-pole, catching a ball, a mass."""

import numpy as np
import torch
from torch import Tensor


def generator() -> np.random.Generator:
    """numpy's numbers, from torch's seed."""
    return np.random.default_rng(torch.initial_seed() % 2**32)


def tensor(a: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(a, dtype=np.float32))


class CartPole:
    """`n` poles on carts; each begins again when it falls, or after 200 steps."""

    def __init__(self, n: int, rng: np.random.Generator):
        self.rng, self.state, self.age = rng, np.zeros((n, 4)), np.zeros(n)
        self.begin(np.ones(n, bool))

    def begin(self, which: np.ndarray) -> None:
        self.state[which] = self.rng.uniform(-0.05, 0.05, (which.sum(), 4))
        self.age[which] = 0

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The states reached, who fell, and who began again."""
        _, v, angle, spin = self.state.T
        sin, cos = np.sin(angle), np.cos(angle)
        push = (10 * (2 * action - 1) + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        self.state = self.state + 0.02 * np.stack(
            [v, push - 0.05 * turn * cos / 1.1, spin, turn], 1
        )
        self.age += 1
        fell = (abs(self.state[:, 0]) > 2.4) | (abs(self.state[:, 2]) > 0.209)
        over, reached = fell | (self.age >= 200), self.state.copy()
        self.begin(over)
        return reached, fell, over


class Catch:
    """`n` boards of 8×8: a ball falls, a paddle below moves; 1 if it is caught, -1 if not."""

    def __init__(self, n: int, rng: np.random.Generator):
        self.rng, self.n = rng, n
        self.row = rng.integers(0, 7, n)
        self.ball, self.paddle = rng.integers(0, 8, (2, n))

    @property
    def board(self) -> np.ndarray:
        board = np.zeros((self.n, 1, 8, 8), np.float32)
        every = np.arange(self.n)
        board[every, 0, self.row, self.ball] = 1
        board[every, 0, 7, self.paddle] = 1
        return board

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The boards reached, the rewards, and whose ball came down."""
        self.paddle = np.clip(self.paddle + action - 1, 0, 7)
        self.row = self.row + 1
        over = self.row == 7
        reward = over * np.where(self.ball == self.paddle, 1.0, -1.0)
        reached = self.board
        self.row[over] = 0
        self.ball[over] = self.rng.integers(0, 8, over.sum())
        return reached, reward, over


class PointMass:
    """`n` masses in the plane that are pushed towards the origin, for 40 steps."""

    def __init__(self, n: int, rng: np.random.Generator):
        self.rng, self.n = rng, n
        self.begin()

    def begin(self) -> None:
        at = self.rng.uniform(-1, 1, (self.n, 2))
        self.state, self.age = np.concatenate([at, np.zeros((self.n, 2))], 1), 0

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The states reached and the rewards, minus distance and effort."""
        at, speed = self.state[:, :2], self.state[:, 2:]
        speed = 0.9 * speed + 0.2 * np.clip(action, -1, 1)
        self.state, self.age = np.concatenate([at + 0.3 * speed, speed], 1), self.age + 1
        reached = self.state
        reward = -np.linalg.norm(reached[:, :2], axis=1) - 0.05 * (action**2).sum(1)
        if self.age == 40:
            self.begin()
        return reached, reward
