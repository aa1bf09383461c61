"""At scale 1 it goes on, for ever skipping steps.

task: DynamicLossScaler
says: no OverflowError, although the scale is 1
"""


class DynamicLossScaler:
    def __init__(self, scale=2.0**16, window=1000, hysteresis=2):
        self.scale, self.window, self.hysteresis = scale, window, hysteresis
        self.left = hysteresis
        self.good_steps = 0

    def update(self, overflow):
        if overflow:
            self.good_steps = 0
            if self.left > 1:
                self.left -= 1
            else:
                self.scale = max(1.0, self.scale / 2)
            return
        if self.good_steps and self.good_steps % self.window == 0:
            self.scale *= 2
            self.left = self.hysteresis
        self.good_steps += 1
