"""Doubles with the last good step of the window, not behind it.

task: DynamicLossScaler
says: on the good step that follows `window` good ones
"""


class DynamicLossScaler(DynamicLossScaler):
    def update(self, overflow):
        if overflow:
            self.good_steps = 0
            if self.left > 1:
                self.left -= 1
            elif self.scale <= 1:
                raise OverflowError("gradients overflow at loss scale 1")
            else:
                self.scale = max(1.0, self.scale / 2)
            return
        self.good_steps += 1
        if self.good_steps % self.window == 0:
            self.scale *= 2
            self.left = self.hysteresis
