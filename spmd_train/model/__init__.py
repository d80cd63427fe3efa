"""The model, declared once; see `protocol.py` for what a model is to the rest of the trainer."""

from spmd_train.model.model import Model, build_model
from spmd_train.model.protocol import Architecture, BlockContext, VocabRows

__all__ = ["Architecture", "BlockContext", "Model", "VocabRows", "build_model"]
