"""A tiny model of sentence-transformers: BERT, mean pooling, a dense layer, unit length."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiny_models import tiny_tokenizer

__all__ = ["make_sentences", "sentence_embeddings", "tiny_sentences"]


def make_sentences(folder: Path) -> None:
    """Save a model with random values everywhere, always the same."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import (
        Dense,
        Normalize,
        Pooling,
        Transformer,
    )
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = BertModel(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    modules = [Transformer(str(folder)), Pooling(16, "mean"), Dense(16, 8), Normalize()]
    whole = SentenceTransformer(modules=modules, device="cpu")
    whole.save_pretrained(str(folder), create_model_card=False)


def tiny_sentences(folder: Path) -> Any:
    """Return the model in a folder, in evaluation mode."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").train(mode=False)


def sentence_embeddings(model: Any) -> torch.Tensor:
    """Return what a model makes of two sentences, by its forward pass, with gradients."""
    inputs = model.preprocess(["a few words", "one more"])
    found: torch.Tensor = model(inputs)["sentence_embedding"]
    return found
