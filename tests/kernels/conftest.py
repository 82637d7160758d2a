"""Torch's threads must not spin: tests share the cores with other processes. Set before torch is loaded."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
