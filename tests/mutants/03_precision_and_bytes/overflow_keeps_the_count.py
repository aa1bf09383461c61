"""The good steps are not counted anew after an overflow.

task: DynamicLossScaler
says: it doubles too early
"""


class DynamicLossScaler:
    def __init__(self, scale=2.0**16, window=1000, hysteresis=2):
        self.scale, self.window, self.hysteresis = scale, window, hysteresis
        self.left = hysteresis
        self.good_steps = 0

    def update(self, overflow):
        if overflow:
            if self.left > 1:
                self.left -= 1
            elif self.scale <= 1:
                raise OverflowError
            else:
                self.scale /= 2
            return
        if self.good_steps and self.good_steps % self.window == 0:
            self.scale *= 2
            self.left = self.hysteresis
        self.good_steps += 1
