"""An overflow takes three quarters of the scale.

task: DynamicLossScaler
says: this overflow halves it
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
                self.scale //= 4
            return
        if self.good_steps and self.good_steps % self.window == 0:
            self.scale *= 2
            self.left = self.hysteresis
        self.good_steps += 1
