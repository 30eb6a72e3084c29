"""The flight recorder: the last steps in a ring, written to a file on a failure, looked at and run again later."""

from cluster.flight.recorder import FlightRecorder, NoRecorder
from cluster.flight.recording import Recording, read_recording

__all__ = ["FlightRecorder", "NoRecorder", "Recording", "read_recording"]
