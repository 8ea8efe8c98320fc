"""Waits on an accelerator are measured by events that are read when they have passed, and never waited for."""

import types

import pytest
import torch

from vescale._wait_clock import WaitClock


class Device:
    """Stands in for a device: events are recorded in order, and pass when the device has come to them."""

    def __init__(self):
        self.now, self.passed, self.recorded = 0.0, 0, 0

    def module(self):
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                device.recorded += 1
                self.number, self.time = device.recorded, device.now

            def query(self):
                return self.number <= device.passed

            def elapsed_time(self, end):
                assert self.query()
                assert end.query()
                return 1000 * (end.time - self.time)

        return types.SimpleNamespace(Event=Event)


@pytest.fixture
def device(monkeypatch):
    found = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda name: {"cuda": found.module()}[name])
    return found


def wait(clock, device, seconds):
    with clock.waiting("cuda"):
        device.now += seconds


def test_only_what_has_passed_is_read(device):
    clock = WaitClock()
    for seconds in (1.0, 2.0, 4.0):
        wait(clock, device, seconds)
    assert clock.take() == 0.0
    device.passed = 3  # the second wait has begun, and not ended
    assert clock.take() == 1.0
    device.passed = 6
    assert clock.take() == 6.0
    assert clock.take() == 0.0


def test_a_pause_records_nothing_and_loses_nothing(device):
    clock = WaitClock()
    wait(clock, device, 1.0)
    clock.is_paused = True
    wait(clock, device, 2.0)
    clock.is_paused = False
    wait(clock, device, 4.0)
    device.passed = device.recorded
    assert device.recorded == 4
    assert clock.take() == 5.0


def test_the_host_is_measured_by_its_clock():
    clock = WaitClock()
    with pytest.raises(KeyError), clock.waiting("cpu"):
        raise KeyError  # a failed collective was waited for, too
    assert 0 < clock.take() < 1
