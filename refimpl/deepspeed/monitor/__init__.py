"""Where metrics go, for who writes them by hand. DeepSpeed: deepspeed/monitor; ours: refimpl/engine/monitor.py."""
