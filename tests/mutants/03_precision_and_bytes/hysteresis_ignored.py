"""Every overflow halves the scale, whatever the hysteresis.

task: DynamicLossScaler
says: hysteresis endures this overflow
"""


class DynamicLossScaler:
    def __init__(self, scale=2.0**16, window=1000, hysteresis=2):
        self.scale, self.window, self.hysteresis = scale, window, hysteresis
        self.left = hysteresis
        self.good_steps = 0

    def update(self, overflow):
        if overflow:
            if self.scale <= 1:
                raise OverflowError
            self.scale /= 2
            self.good_steps = 0
            return
        if self.good_steps and self.good_steps % self.window == 0:
            self.scale *= 2
        self.good_steps += 1
