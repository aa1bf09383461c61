"""All monitors of a configuration, or one: rank 0 writes. DeepSpeed: deepspeed/monitor/monitor.py."""

from typing import Any, ClassVar

from refimpl.comm.group import Group
from refimpl.engine.configuration.monitors import Monitors
from refimpl.engine.monitor import Event
from refimpl.engine.monitor import Monitor as Writers


class Monitor:
    """What `write_events` is called of."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    def write_events(self, event_list: list[Event]) -> None:
        """Write (name, value, step) each, on rank 0; elsewhere nothing."""
        raise NotImplementedError


class One(Monitor):
    """The monitor of one section, whose keys are its attributes."""

    section: ClassVar[str]

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        for key in type(monitor_config).model_fields:
            setattr(self, key, getattr(monitor_config, key))
        self.writers = Writers(Monitors(**{self.section: monitor_config}), Group.world().rank)

    def write_events(self, event_list: list[Event], flush: bool = True) -> None:
        """Write them, so that they can be seen at once."""
        self.writers.write(event_list)


class TensorBoardMonitor(One):
    section = "tensorboard"


class WandbMonitor(One):
    section = "wandb"


class CometMonitor(One):
    section = "comet"


class csvMonitor(One):
    section = "csv_monitor"


class MonitorMaster(Monitor):
    """All that a configuration asks for: `MonitorMaster(DeepSpeedConfig("ds.json").monitor_config)`."""

    def __init__(self, monitor_config: Monitors) -> None:
        super().__init__(monitor_config)
        self.enabled = monitor_config.enabled
        first, asked = Group.world().rank == 0, monitor_config
        self.tb_monitor = TensorBoardMonitor(asked.tensorboard) if first and asked.tensorboard.enabled else None
        self.wandb_monitor = WandbMonitor(asked.wandb) if first and asked.wandb.enabled else None
        self.comet_monitor = CometMonitor(asked.comet) if first and asked.comet.enabled else None
        self.csv_monitor = csvMonitor(asked.csv_monitor) if first and asked.csv_monitor.enabled else None

    def write_events(self, event_list: list[Event]) -> None:
        for monitor in (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor):
            if monitor is not None:
                monitor.write_events(event_list)
