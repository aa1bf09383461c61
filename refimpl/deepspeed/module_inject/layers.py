"""AutoTP's switch. DeepSpeed: deepspeed/module_inject/layers.py; ours: refimpl/parallel/autotp.py."""


def set_autotp_mode(training: bool = False) -> None:
    """Nothing to do for training. NotImplementedError for inference."""
    if not training:
        raise NotImplementedError("set_autotp_mode(training=False): not part of this project: inference kernels")
