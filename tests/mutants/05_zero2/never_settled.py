"""finish() forgets the last bucket.

task: GradientShards
says: returns while 1 of its transfers are still under way
"""


class GradientShards(GradientShards):
    def finish(self):
        while self.launched < len(self.buckets):
            self.launch()
        self.ready.clear()
        self.launched = 0
