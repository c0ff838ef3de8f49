from __future__ import annotations

import pytest

from peagle.text import Tokenizer
from tests.builders.tokenizer import build_byte_fallback_tokenizer_directory, build_tokenizer_directory


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(build_tokenizer_directory(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("byte_fallback")
    return Tokenizer.from_directory(build_byte_fallback_tokenizer_directory(path))
