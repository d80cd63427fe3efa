"""Bytes in, bytes out: compared with Python's own UTF-8."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_train.data.tokenizer import ByteTokenizer, tokenizer
from spmd_train.errors import RequestError


@given(st.text())
def test_every_text_round_trips(text):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.uint8
    assert ids.tolist() == list(text.encode("utf-8"))
    assert ByteTokenizer().decode(ids) == text


def test_bytes_are_taken_as_they_are_and_broken_ones_are_shown():
    assert ByteTokenizer().encode(b"\xff\x00").tolist() == [255, 0]
    assert ByteTokenizer().decode([65, 0xFF, 66]) == "A�B"


def test_chosen_by_name():
    assert isinstance(tokenizer("bytes"), ByteTokenizer)
    with pytest.raises(RequestError, match=r"data\.tokenizer='bpe' is not known: use one of bytes"):
        tokenizer("bpe")
