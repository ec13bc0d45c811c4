"""What is written beside the numbers: versions, and no name of the machine."""

import numpy as np
import torch


def pytest_benchmark_update_machine_info(config, machine_info):
    for name in ("node", "release"):
        del machine_info[name]
    machine_info.update(torch=torch.__version__, numpy=np.__version__)
    machine_info["torch_threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        import triton

        machine_info.update(gpu=torch.cuda.get_device_name(), triton=triton.__version__)
