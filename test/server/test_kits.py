"""SGLang's own test kits against one server with the compressed cache.

Run as they are: `BasicAPIContractMixin`, most of `BasicDecodeCorrectnessMixin` and `BasicSchedulerStressMixin`, and of
`abort_timeout_kit` `AbortAllMixin` and `RunningTimeoutTwoWaveMixin`.

Left out:

* `test_basic_math` asks for 17 x 23, and `test_concurrent_requests` for capitals after an instruction: the model of 135M
  parameters answers neither, with SGLang's own cache as little. `test_answers.py` asks for capitals it knows.
* `test_color_completion` waits for "yellow". In fp32 the model's fourth and fifth words lead by less than 0.1 nat; in bf16
  they are exact ties, transformers' own bf16 model never says yellow, and which way it goes depends on the processor.
* `WaitingTimeoutMixin` needs `--max-running-requests 1`, so a server of its own; it tests SGLang's queue and no cache.
* `PrefixCacheBranchingMixin` asserts that the *second* request with a shared prefix misses. That is so for state-space
  models; a tree of attention pages hits at once. `test_answers.py` has the exact hits.
"""

import unittest
from collections.abc import Iterator

import pytest
from served import ARENA, Served, StartServer
from sglang.test.kits.abort_timeout_kit import AbortAllMixin, RunningTimeoutTwoWaveMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin

pytestmark = pytest.mark.e2e

RUNNING_TIMEOUT_S = 55
"""Below the 60 s that the kits wait for an answer, above what any other test here takes."""


@pytest.fixture(scope="module")
def running(start_server: StartServer) -> Served:
    return start_server(*ARENA, SGLANG_REQ_RUNNING_TIMEOUT=str(RUNNING_TIMEOUT_S))


class OnServer(unittest.TestCase):
    """Gives the kits what they ask for."""

    @pytest.fixture(autouse=True)
    def _server(self, running: Served) -> Iterator[None]:
        running.flush()
        self.base_url = running.url
        self.process = running.process
        yield
        running.wait_idle()
        assert running.faults() == []


class TestContract(BasicAPIContractMixin, OnServer):
    pass


class TestDecode(BasicDecodeCorrectnessMixin, OnServer):
    test_basic_math = None
    test_color_completion = None


class TestStress(BasicSchedulerStressMixin, OnServer):
    test_concurrent_requests = None


class TestAbortAll(AbortAllMixin, OnServer):
    abort_all_num_requests = 16
    abort_all_max_new_tokens = 8000  # what the model's context of 8192 tokens allows
    abort_all_sleep = 4  # a busy machine needs longer to take in all requests


class TestRunningTimeout(RunningTimeoutTwoWaveMixin, OnServer):
    pass
