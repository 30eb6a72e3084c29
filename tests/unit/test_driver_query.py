"""Questions to the driver's thread: their errors are the asker's, and an ended driver answers nothing."""

import threading
from types import SimpleNamespace

import pytest

from cluster.driver_query import ask_driver


class Loop:
    """A thread that runs what is posted, like the driver's."""

    def __init__(self, failure=None):
        self.failure = failure
        self.ran_in = set()

    def post(self, command):
        thread = threading.Thread(target=lambda: (self.ran_in.add(threading.get_ident()), command()))
        thread.start()
        thread.join()


def test_the_answer_comes_from_the_other_thread():
    loop = Loop()
    assert ask_driver(loop, lambda: 7) == 7
    assert threading.get_ident() not in loop.ran_in


def test_an_error_is_the_askers():
    with pytest.raises(ZeroDivisionError):
        ask_driver(Loop(), lambda: 1 / 0)


def test_an_ended_driver_answers_nothing():
    assert ask_driver(SimpleNamespace(failure=RuntimeError("over")), lambda: 7) is None
