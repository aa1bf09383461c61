"""Everything travels when backward is over.

task: GradientShards
says: nothing is sent before the last gradient: launch from the hook
"""


class GradientShards(GradientShards):
    def on_gradient(self, p):
        self.ready.add(p)
