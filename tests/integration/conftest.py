"""One trained pair for every test that needs drafts which are right now and then."""

from __future__ import annotations

import pytest

from tests.builders.tokenizer import build_tokenizer_directory
from tests.builders.trained_head import TrainedPair, write_trained_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TrainedPair:
    """The two checkpoints, with a tokenizer beside the target."""
    pair = write_trained_pair(tmp_path_factory.mktemp("pair"))
    build_tokenizer_directory(pair.target)
    return pair
