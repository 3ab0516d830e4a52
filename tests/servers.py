"""transformers' own server on loopback, and a tiny target whose answers are words."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.cli.serve import Serve

from tests.conftest import make_config, make_target, make_tokenizer


def make_writer(tokenizer: PreTrainedTokenizerFast, words: bool = True, memory: bool = True) -> PreTrainedModel:
    """A target that, without sampling, writes only words (one token each) and ends now and then.

    Args:
        tokenizer: TOK-A.
        words: False lets it write single letters, in tokens that the tokenizer would not choose.
        memory: False makes each token depend on the one before it alone, so that answers end in loops.
    """
    model = make_target(make_config(tied=False), seed=3)
    texts = {index: tokenizer.decode([index]) for index in range(5, 500)}
    if words:
        good = [i for i, text in texts.items() if text[0] == " " and text[1:].isascii() and text[1:].isalpha()]
    else:
        good = [i for i, text in texts.items() if text in "the"]  # "th" and "he" are tokens of their own
    good += [4] * memory
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[4] *= 1.2
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= memory
            layer.mlp.down_proj.weight *= memory
        for index in sorted(set(range(head.shape[0])) - set(good)):
            # Half of a wanted row: never the largest, since the largest of many logits is above zero.
            head[index] = 0.5 * head[good[index % len(good)]]
    return model


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def serve(folder: Path) -> Iterator[tuple[str, Serve]]:
    """`transformers serve FOLDER` in a thread of this process: its address and the server."""
    port = free_port()
    server = Serve(str(folder), host="127.0.0.1", port=port, device="cpu", log_level="error", non_blocking=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx2.get(url + "/health").status_code == 200:
                    break
            except httpx2.TransportError:
                time.sleep(0.05)
        yield url, server
    finally:
        server.kill_server()


def save(folder: Path, words: bool = True, memory: bool = True) -> Path:
    """The writer as a checkpoint folder that can be served."""
    tokenizer = make_tokenizer()
    make_writer(tokenizer, words, memory).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
