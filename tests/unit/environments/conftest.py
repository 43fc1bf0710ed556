"""One scoring process for all tests of this folder: it takes seconds to start."""

import pytest

from nemo_rl_dsv4.environments import MathEnvironment


@pytest.fixture(scope="session")
def environment():
    environment = MathEnvironment(num_workers=1, timeout_seconds=20)
    yield environment
    environment.shutdown()
