"""Of DeepSpeed's words, keys and defaults those that scripts import. DeepSpeed: deepspeed/runtime/constants.py."""

ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT, ROUTE_ENCODE = "train", "eval", "predict", "encode"  # `deepspeed_io`'s
GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT = "gradient_clipping", 1.0
SCHEDULER_TYPE_DEFAULT = None
