"""The rows of the embedding as a leaf of their own: the states and gradients of the plain path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from distill.loss_block import PRODUCT_ROWS, whole_rows
from distill.teacher import ResponseDataset
from distill.words import Words, states_of
from tests.distill.test_batches import KINDS, draft
from tests.distill.test_module import write_answers


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_gradients_are_those_of_the_whole_table(kind: str, t_tied: PreTrainedModel, tmp_path: Path) -> None:
    """Over two micro-batches; gemma scales what its embedding gives."""
    data, model = ResponseDataset(write_answers(tmp_path / "answers", t_tied), 64), draft(kind).float().train()
    embedding = model.get_input_embeddings()
    embedding.padding_idx = None
    window = [data.collate([0, 1, 2]), data.collate([3, 4])]
    plain = [states_of(model, batch) for batch in window]
    sum(states.square().sum() for states in plain).backward()
    wanted = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()

    words = Words.read(embedding, [batch.input_ids for batch in window])
    assert words is not None and len(words.ids) < len(embedding.weight) / 2
    found = [states_of(model, batch, words) for batch in window]
    for one, other in zip(found, plain):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    sum(states.square().sum() for states in found).backward()
    assert embedding.weight.grad is None
    words.give_back(embedding)
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert gradients.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-5, atol=1e-6, msg=name)
    words.give_back(embedding)  # a second time: it adds
    torch.testing.assert_close(embedding.weight.grad, 2 * wanted["model.embed_tokens.weight"], rtol=1e-5, atol=1e-6)


def test_a_table_that_is_not_trained_has_no_words(t_tied: PreTrainedModel) -> None:
    embedding = torch.nn.Embedding(8, 4).requires_grad_(False)
    assert Words.read(embedding, [torch.tensor([[1, 2]])]) is None


def test_shapes_come_again(t_tied: PreTrainedModel, tmp_path: Path) -> None:
    """Batches whose longest rows differ by some tokens are of one width, and so are the products of their losses."""
    sizes = [(8, 3), (8, 4), (8, 6), (8, 9)]
    data = ResponseDataset(write_answers(tmp_path / "answers", t_tied, sizes), 64)
    assert {data.collate([row]).input_ids.shape for row in range(4)} == {(1, 16)}
    for num in (1, PRODUCT_ROWS, PRODUCT_ROWS + 1):
        x = torch.ones(num, 3)
        filled = whole_rows(x)
        assert len(filled) % PRODUCT_ROWS == 0 and len(filled) - num < PRODUCT_ROWS
        assert torch.equal(filled[:num], x) and not filled[num:].any()
