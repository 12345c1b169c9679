"""What every test needs before anything else: the BLAS under MLX, and no network behind a test's back."""

import os

from kernels import backend

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
backend.load()
