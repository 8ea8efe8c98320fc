"""The error of schedules."""


class ScheduleError(ValueError):
    """Raised for a schedule that cannot run or does not compute each gradient exactly once."""
