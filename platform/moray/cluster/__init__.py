"""Ray: the only library package that imports it. Sessions, capture on Ray Data, training on Ray Train.

Importing this package sets defaults for Ray's environment variables. It is the one place where something
happens at import: Ray reads most of them when it is itself imported, once and for good.
"""

import os

ENVIRONMENT = {
    # Explicit on both sides: Ray's own default depends on which files an earlier run left behind.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # Sweeps show their own progress, and keep their own files and figures for TensorBoard.
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # Tune would end quietly on Ctrl-C, as if all trials had been run.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_DATA_USE_DATASOURCE_V2": "0",
    # Say nothing of a task that failed and will be tried again.
    "RAY_enable_output_error_log_if_still_retry": "0",
    # A sweep has many processes that only wait, which Ray warns of on every run.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "worker processes have been started on node",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # Activations of a training step are large: by default glibc gives each back to the kernel at once and faults
    # it in anew, which took a fifth of a distillation step's time on a CPU.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
