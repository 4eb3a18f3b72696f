"""A time as a line, followed robustly while it is measured: y = level + slope x, both above zero.

An extended Kalman filter of the two logarithms: what is not excited keeps its share of what is, a wild value (a kernel
compiled, a graph captured, a machine that paused) counts for three deviations at most, and three of them in a row on
one side are a change, not noise.
"""

import math
from dataclasses import dataclass, replace

WILD = 3.0  # deviations that a value may count for
IN_A_ROW = 3  # wild values on one side that are a change
DRIFT = (2e-5, 2e-5)  # variance that a step adds: a time wanders by some tenths of a percent
UNSURE = (1.0, 1.0)  # variance of the logarithms at the start, and after a change
QUIET, LOUD = 0.01, 0.5  # least and most deviation of a value, relative


@dataclass
class Line:
    """`share`: the slope over the level that is assumed before anything tells them apart."""

    share: float
    level: float = 0.0  # 0: nothing was measured
    slope: float = 0.0
    doubt: tuple[float, float, float] = (UNSURE[0], 0.0, UNSURE[1])  # covariance of the logarithms: 00, 01, 11
    deviation: float = LOUD / 2
    streak: int = 0  # wild values in a row, signed
    seen: int = 0

    def __call__(self, x: float) -> float:
        return self.level + self.slope * x

    def add(self, x: float, y: float) -> None:
        """One measurement, y > 0 at x >= 0; others are none, and left out."""
        if not (y > 0 and math.isfinite(y)):
            return
        self.seen += 1
        if not self.level:
            self.level = y / (1 + self.share * x)
            self.slope = self.share * self.level
            return
        self._follow(x, y)

    def unsure(self) -> "Line":
        """The same line, ready to be somewhere else."""
        return replace(self, doubt=(UNSURE[0], 0.0, UNSURE[1]), deviation=LOUD, streak=0)

    def _follow(self, x: float, y: float) -> None:
        expected = self(x)
        wrong = math.log(y / expected)
        self._count(wrong)
        a, b = self.level / expected, self.slope * x / expected
        v00, v01, v11 = self.doubt[0] + DRIFT[0], self.doubt[1], self.doubt[2] + DRIFT[1]
        u0, u1 = v00 * a + v01 * b, v01 * a + v11 * b
        spread = a * u0 + b * u1 + self.deviation**2
        most = WILD * self.deviation
        wrong = min(max(wrong, -most), most)
        self.level *= math.exp(u0 / spread * wrong)
        self.slope *= math.exp(u1 / spread * wrong)
        self.doubt = (v00 - u0 * u0 / spread, v01 - u0 * u1 / spread, v11 - u1 * u1 / spread)
        self.deviation += 0.05 * (1.25 * min(abs(wrong), most) - self.deviation)  # 1.25: deviation over mean of |e|
        self.deviation = min(max(self.deviation, QUIET), LOUD)

    def _count(self, wrong: float) -> None:
        """Notice a change: then nothing is sure any more."""
        side = 0 if abs(wrong) <= WILD * self.deviation else 1 if wrong > 0 else -1
        self.streak = self.streak + side if side and side * self.streak >= 0 else side
        if abs(self.streak) >= IN_A_ROW:
            self.doubt, self.deviation, self.streak = (UNSURE[0], 0.0, UNSURE[1]), LOUD, 0
