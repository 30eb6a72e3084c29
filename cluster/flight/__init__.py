"""The flight recorder: the last steps in a ring, written to a file on a failure, looked at and run again later."""

from cluster.flight.recorder import FlightRecorder
from cluster.flight.recording import Recording, read_recording

__all__ = ["FlightRecorder", "Recording", "read_recording"]
