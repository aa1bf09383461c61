"""From a DeepSpeed configuration to a training loop: config, build, engine, checkpoint, monitors."""
