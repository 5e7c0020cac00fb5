"""The kernels use as many threads as torch was told to, and only torch's own: counted as threads of the process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from efla.native import missing
from tests.fresh import run_fresh

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason="the kernels are not built"),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the entries of /proc/self/task"),
]

SCAN = """
import json, os, sys
import torch, efla

def threads():
    return len(os.listdir("/proc/self/task"))

def scan():
    # Enough heads for every thread, long enough for more than one; then the backward pass and a decoded token.
    q, k, v = (torch.randn(4, 256, 8, 64, requires_grad=True) for _ in range(3))
    beta = torch.rand(4, 256, 8)
    o, _ = efla.linear_attention(q, 0.1 * k, v, beta, backend="native")
    o.sum().backward()
    with torch.no_grad():
        state = torch.zeros(4, 8, 64, 64)
        token = [x[:, :1].contiguous() for x in (q, k, v, beta)]
        efla.linear_attention(*token, backend="native", initial_state=state, output_final_state=True, inplace_state=True)

def started_by_a_scan():
    before = threads()
    scan()
    return threads() - before
"""


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_scan_starts_a_team_of_torchs_threads_and_torch_reuses_it(threads):
    """A second pool would show as more threads once torch has computed something large too."""
    code = f"""{SCAN}
torch.set_num_threads({threads})
by_scan, before = started_by_a_scan(), threads()
x = torch.randn(1 << 22)
(x + x).mul_(2).sum()
scan()
print(json.dumps([by_scan, threads() - before]))
"""
    done = run_fresh(code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [threads - 1, 0]


def test_one_thread_after_many_starts_no_more():
    code = f"{SCAN}\ntorch.set_num_threads(3); scan(); torch.set_num_threads(1); print(started_by_a_scan())"
    done = run_fresh(code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 0


def test_a_worker_of_a_data_loader_uses_its_own_thread_only():
    code = f"""{SCAN}
class Scans(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return torch.tensor([torch.get_num_threads(), started_by_a_scan()])

torch.set_num_threads(2)
scan()  # the parent has a team, which a forked worker does not inherit
print(json.dumps(torch.stack(list(torch.utils.data.DataLoader(Scans(), batch_size=None, num_workers=2))).tolist()))
"""
    done = run_fresh(code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[1, 0], [1, 0]]


def test_two_ranks_of_torchrun_use_one_thread_each(tmp_path):
    script = tmp_path / "ranks.py"
    report = """
torch.distributed.init_process_group("gloo")
name = f"rank{torch.distributed.get_rank()}.json"
with open(os.path.join(os.path.dirname(__file__), name), "w") as file:
    json.dump([torch.get_num_threads(), started_by_a_scan()], file)
torch.distributed.destroy_process_group()
"""
    script.write_text(SCAN + report)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    done = subprocess.run(
        [*command, "--rdzv-endpoint", "127.0.0.1:0", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads((tmp_path / f"rank{i}.json").read_text()) for i in range(2)] == [[1, 0], [1, 0]]
