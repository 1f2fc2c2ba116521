"""Augmentation of whole batches."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def random_crop_flip(images: Tensor, padding: int = 4) -> Tensor:
    """Shift each image by up to ``padding`` pixels, filling with zeros, and flip half of them horizontally.

    Random numbers come from torch's global CPU generator on every device, so that a seed gives the same augmentation everywhere.

    Args:
        images: batch of shape (B, C, H, W). Apply it before normalization, so that the filling is black.
        padding: maximum shift in pixels.
    """
    count, channels, height, width = images.shape
    shift = torch.randint(0, 2 * padding + 1, (2, count, 1))
    mirrored = torch.rand(count, 1) < 0.5
    rows = torch.arange(height) + shift[0]
    columns = torch.arange(width) + shift[1]
    columns = torch.where(mirrored, columns.flip(1), columns)
    rows, columns = rows.to(images.device), columns.to(images.device)
    batch = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(channels, device=images.device)[:, None, None]
    return pad(images, (padding,) * 4)[batch, channel, rows[:, None, :, None], columns[:, None, None, :]]
