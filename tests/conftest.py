"""The surroundings of every test: no network, no telemetry, one thread per process, no tracking server or cluster of the shell's.

Imports nothing heavy, so that `tests/core` runs with only torch, transformers, pytest and hypothesis installed. It must run
before those libraries are imported: they read these variables once.
"""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    DO_NOT_TRACK="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    RAY_USAGE_STATS_ENABLED="0",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",  # waiting threads must sleep: several test processes share few cores
)
for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
    os.environ.pop(name, None)
