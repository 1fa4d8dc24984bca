"""Settings of every test."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
# The tests run one process a core.
torch.set_num_threads(1)
