"""The transformer computes what its docstring says, and its weights don't depend on how it came to be."""

import pytest
import torch

from shardwright.recipe.config import ModelConfig, SampleConfig
from shardwright.train.models import Transformer, loss_of, rotary_angles, rotate
from shardwright.train.sample import generate, readable

TINY = ModelConfig(num_layers=2, dim=16, num_heads=2, hidden_dim=24)


def tiny(seed=0, **changes):
    with torch.device("meta"):
        model = Transformer(TINY.model_copy(update=changes))
    model.to_empty(device="cpu")
    model.reset_parameters(seed)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_shapes_and_parameters(tied):
    model = tiny(tied_embedding=tied)
    tokens = torch.randint(256, (3, 7))
    assert model(tokens).shape == (3, 7, 256)
    block = 4 * 16 * 16 + 3 * 16 * 24 + 2 * 16
    assert sum(p.numel() for p in model.parameters()) == (1 if tied else 2) * 256 * 16 + 2 * block + 16
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not list(model.buffers())


def test_no_position_sees_a_later_one():
    model = tiny().eval()
    tokens = torch.randint(256, (1, 9))
    changed = tokens.clone()
    changed[0, 5] += 1
    difference = (model(tokens) - model(changed % 256)).abs().amax(dim=(0, 2))
    assert (difference[:5] == 0).all()
    assert (difference[5:] > 0).all()


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    q, k = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotary = rotary_angles(20, 8, 10000.0, q)
    turned_q, turned_k = (rotate(x.expand(1, 1, 20, 8), rotary)[0, 0] for x in (q, k))
    assert torch.allclose(turned_q.norm(dim=-1), q.norm().expand(20))
    assert torch.allclose(turned_q[3] @ turned_k[1], turned_q[19] @ turned_k[17], rtol=1e-6)
    assert not torch.allclose(turned_q[3] @ turned_k[1], turned_q[3] @ turned_k[2], rtol=1e-3)


def test_weights_follow_from_seed_and_name_alone():
    states = [tiny(seed).state_dict() for seed in (0, 0, 1)]
    name = "blocks.1.attention.qkv.weight"
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(states[0][name], states[2][name])
    deeper = tiny(num_layers=3).state_dict()
    assert torch.equal(states[0][name], deeper[name])


def test_an_untrained_model_knows_nothing():
    tokens = torch.randint(256, (2, 33))
    loss = loss_of(tiny()(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.05)


def test_recomputed_activations_give_the_same_gradients_also_with_dropout():
    tokens = torch.randint(256, (2, 9))
    grads = []
    for checkpointing in (False, True):
        model = tiny(dropout=0.5)
        model.activation_checkpointing = checkpointing
        torch.manual_seed(1)
        loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_the_same_seed_writes_the_same_text():
    wanted = SampleConfig(num_bytes=12, prompt="def ")
    first, again, other = (generate(tiny(), wanted, 8, seed) for seed in (1, 1, 2))
    assert len(first) == 12
    assert first == again != other


def test_temperature_zero_takes_the_likeliest_byte():
    model = tiny().eval()
    text = generate(model, SampleConfig(num_bytes=1, prompt="ab", temperature=0.0), 8, seed=0)
    assert text[0] == int(model(torch.tensor([[0, 97, 98]]))[0, -1].argmax())


def test_a_sample_is_safe_on_a_terminal():
    assert readable(b"a\tb\n\x1b[31m\xff\x00") == "a\tb\n\\x1b[31m\\xff\\x00"
