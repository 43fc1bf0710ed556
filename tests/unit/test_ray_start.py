"""Starting Ray, and what its failures look like."""

import pytest

from nemo_rl_dsv4 import cluster
from nemo_rl_dsv4.errors import UserError


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        (None, Exception("The current node timed out during startup."), r"Ray did not start: .*timed out.*allow more"),
        ("10.0.0.1:6379", ConnectionError("no route"), r"RAY_ADDRESS=10.0.0.1:6379 cannot be used: no route; start"),
        (None, RuntimeError(), r"Ray did not start: RuntimeError; free memory"),
    ],
)
def test_a_ray_that_does_not_start_is_one_line(monkeypatch, address, error, message):
    """A start-up time-out on a busy machine was a traceback of a bare Exception."""

    def fail(**_):
        raise error

    monkeypatch.setattr(cluster.ray, "init", fail)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=message):
        cluster.start_ray({})
