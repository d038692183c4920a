"""Waiting for a device, so that a clock that is read next is right."""

import torch


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
