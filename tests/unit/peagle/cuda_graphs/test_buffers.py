"""Fixed memory: every shape is a view of it, and filling never moves it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from peagle.cuda_graphs.buffers import BufferSpec, StaticBuffers


def make_buffers() -> StaticBuffers:
    specs = {"ids": BufferSpec((12,), torch.int64), "rows": BufferSpec((4, 3), torch.float32)}
    return StaticBuffers(specs, torch.device("cpu"))


def test_views_of_every_shape_start_at_one_address() -> None:
    buffers = make_buffers()
    whole = buffers.view("ids", (12,))
    for shape in ((1,), (2, 3), (3, 4), (12,)):
        view = buffers.view("ids", shape)
        assert view.shape == shape
        assert view.is_contiguous()
        assert view.data_ptr() == whole.data_ptr()
    assert buffers.view("rows", (4, 3)).data_ptr() != whole.data_ptr()


def test_fill_copies_from_host_and_device() -> None:
    buffers = make_buffers()
    ids = np.arange(6, dtype=np.int64).reshape(2, 3)
    rows = torch.arange(6, dtype=torch.float64).view(2, 3)  # the buffer's type counts, not the values'
    views = buffers.fill({"ids": ids, "rows": rows})
    ids[:] = -1
    rows.zero_()
    assert views["ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert views["rows"].dtype == torch.float32
    assert views["rows"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert views["ids"].data_ptr() == buffers.view("ids", (12,)).data_ptr()


def test_a_smaller_fill_leaves_the_rest() -> None:
    buffers = make_buffers()
    buffers.fill({"ids": np.arange(12, dtype=np.int64)})
    buffers.fill({"ids": np.full(2, 99, dtype=np.int64)})
    assert buffers.view("ids", (12,)).tolist() == [99, 99, *range(2, 12)]


def test_more_than_fits_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        make_buffers().fill({"ids": np.zeros(13, dtype=np.int64)})
