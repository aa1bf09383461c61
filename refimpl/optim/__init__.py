"""What stands between gradients and the next step: loss scale, learning-rate schedules, optimizers beside torch's."""
