"""Pipeline schedules: creating, reading, checking, explaining and running them, and planning their memory."""

from fuser.schedule.explain import explain_schedule
from fuser.schedule.make import order_1f1b, order_interleaved, overlap_layers
from fuser.schedule.memory import LayerMemory, plan_memory
from fuser.schedule.run import run_schedule
from fuser.schedule.schedule import Schedule, ScheduleError

__all__ = [
    "LayerMemory",
    "Schedule",
    "ScheduleError",
    "explain_schedule",
    "order_1f1b",
    "order_interleaved",
    "overlap_layers",
    "plan_memory",
    "run_schedule",
]
