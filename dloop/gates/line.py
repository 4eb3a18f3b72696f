"""A time as a line, followed robustly while it is measured: y = level (1 + share x), both above zero.

An extended Kalman filter of the two logarithms. The share of what is not seen stays what it was; a wild value (a kernel
compiled, a graph captured, a machine that paused) counts for three deviations at most, and three of them in a row on
one side are a change, not noise.
"""

import math
import statistics
from dataclasses import dataclass, field, replace

WILD = 3.0  # deviations that a value may count for
IN_A_ROW = 3  # wild values on one side that are a change
DRIFT = 1e-4  # variance that a step adds: times wander by a percent
UNSURE = (1.0, 0.0, 1.0)  # covariance of the logarithms at the start
QUIET, START, LOUD = 0.01, 0.25, 0.5  # deviation of a value, relative: least, at first, most
STARTS = 9  # values until the line is followed: half of them may be wild
CALMING = 0.05  # how fast the deviation follows


@dataclass
class Line:
    """`share` begins as what is assumed before anything tells level and slope apart."""

    share: float
    level: float = 0.0  # 0: nothing was measured
    doubt: tuple[float, float, float] = UNSURE  # covariance of log level and log share: 00, 01, 11
    deviation: float = START
    streaks: tuple[int, int] = (0, 0)  # wild values in a row, signed: at x = 0, and beyond
    seen: int = 0
    first: list[float] = field(default_factory=list[float])  # levels by the first values: their median is the start

    @property
    def slope(self) -> float:
        return self.level * self.share

    def __call__(self, x: float) -> float:
        return self.level * (1 + self.share * x)

    def unsure(self) -> "Line":
        """The same line, ready to be somewhere else."""
        return replace(self, doubt=UNSURE, deviation=START, streaks=(0, 0))

    def add(self, x: float, y: float) -> None:
        """One measurement, y > 0 at x >= 0; others are none, and left out."""
        if not (y > 0 and math.isfinite(y)):
            return
        self.seen += 1
        if len(self.first) < STARTS:
            self.first.append(y / (1 + self.share * x))
            self.level = statistics.median(self.first)
            return
        wrong = math.log(y / self(x))
        self._count(x, wrong)
        self._follow(x, wrong)

    def _follow(self, x: float, wrong: float) -> None:
        bend = self.share * x / (1 + self.share * x)  # of log y by log share; by log level it is 1
        v00, v01, v11 = self.doubt[0] + DRIFT, self.doubt[1], self.doubt[2] + DRIFT
        u0, u1 = v00 + v01 * bend, v01 + v11 * bend
        spread = u0 + bend * u1 + self.deviation**2
        most = WILD * self.deviation
        tamed = min(max(wrong, -most), most)
        self.level *= math.exp(u0 / spread * tamed)
        self.share *= math.exp(u1 / spread * tamed)
        self.doubt = (v00 - u0 * u0 / spread, v01 - u0 * u1 / spread, v11 - u1 * u1 / spread)
        self.deviation += CALMING * (1.25 * abs(tamed) - self.deviation)  # 1.25: a normal's deviation over its mean |e|
        self.deviation = min(max(self.deviation, QUIET), LOUD)

    def _count(self, x: float, wrong: float) -> None:
        """Notice a change: then what it shows in is not sure any more."""
        side = 0 if abs(wrong) <= WILD * self.deviation else 1 if wrong > 0 else -1
        beyond = x > 0
        before = self.streaks[beyond]
        streak = before + side if side * before > 0 else side
        if abs(streak) >= IN_A_ROW:
            self.doubt = (max(self.doubt[0], UNSURE[0] * (not beyond)), 0.0, max(self.doubt[2], UNSURE[2] * beyond))
            self.deviation, streak = START, 0
        self.streaks = (self.streaks[0], streak) if beyond else (streak, self.streaks[1])
