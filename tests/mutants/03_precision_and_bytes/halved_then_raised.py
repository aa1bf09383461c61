"""The scale is halved first and looked at afterwards: whoever catches the error goes on with a half.

task: DynamicLossScaler
says: after the OverflowError the scale is 0.5
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
                return
            self.scale /= 2
            if self.scale < 1:
                raise OverflowError("the loss is not finite")
            return
        if self.good_steps and self.good_steps % self.window == 0:
            self.scale *= 2
            self.left = self.hysteresis
        self.good_steps += 1
