"""At scale 1 the first overflow raises, whatever the hysteresis.

task: DynamicLossScaler
says: although hysteresis endures this overflow
"""


class DynamicLossScaler(DynamicLossScaler):
    def update(self, overflow):
        if overflow:
            self.good_steps = 0
            if self.scale <= 1:
                raise OverflowError("gradients overflow at loss scale 1")
            if self.left > 1:
                self.left -= 1
            else:
                self.scale = max(1.0, self.scale / 2)
            return
        if self.good_steps and self.good_steps % self.window == 0:
            self.scale *= 2
            self.left = self.hysteresis
        self.good_steps += 1
