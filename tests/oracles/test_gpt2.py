"""A model of ours with the weights of a GPT-2 of the transformers package is that GPT-2."""

import pytest
import torch
import torch.nn.functional as F

from longlens.models.model import count_parameters, create_model, loss_sum
from longlens.tasks.base import Spec

transformers = pytest.importorskip("transformers", reason="the oracle 'transformers' is not installed")

V, L, D, H, DEPTH = 37, 29, 24, 4, 3
SPEC = Spec("tokens", V, L, "language", V, "bits_per_byte")


def oracle(attention):
    """A random GPT-2 with the exact GELU and a head of its own; nothing in it is 0 or 1."""
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=L, n_embd=D, n_head=H, n_layer=DEPTH, activation_function="gelu", resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False, attn_implementation=attention,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.3)
    return model


def names():
    """Our name, theirs, and whether theirs is transposed (Conv1D keeps its weight as input by output)."""
    yield "embedding.values.weight", "transformer.wte.weight", False
    yield "embedding.learned.weight", "transformer.wpe.weight", False
    for i in range(DEPTH):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        for part, module in (
            ("mixer_norm", "ln_1"), ("mixer.in_proj", "attn.c_attn"), ("mixer.out_proj", "attn.c_proj"),
            ("ffn_norm", "ln_2"), ("ffn.up", "mlp.c_fc"), ("ffn.down", "mlp.c_proj"),
        ):  # fmt: skip
            yield f"{ours}.{part}.weight", f"{theirs}.{module}.weight", "norm" not in part
            yield f"{ours}.{part}.bias", f"{theirs}.{module}.bias", False
    yield "norm.weight", "transformer.ln_f.weight", False
    yield "norm.bias", "transformer.ln_f.bias", False
    yield "head.linear.weight", "lm_head.weight", False


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [L, 17, 1])
def test_logits_and_gradients_are_those_of_gpt2(attention, length):
    theirs = oracle(attention)
    ours = create_model(
        SPEC, "transformer", positions="learned", prenorm=True, depth=DEPTH, width=D, heads=H, dtype=torch.float64
    )
    given = dict(theirs.named_parameters())
    weights = {name: given[other].T if turned else given[other] for name, other, turned in names()}
    ours.load_state_dict(weights)
    assert count_parameters(ours) == count_parameters(theirs), "no parameter is left out"

    tokens, targets = torch.randint(V, (2, 3, length))
    actual, expected = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    assert expected.std() > 0.5

    loss = loss_sum(SPEC, actual, targets) / targets.numel()
    expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-10)
    loss.backward()
    expected_loss.backward()
    for name, other, turned in names():
        gradient = given[other].grad.T if turned else given[other].grad
        torch.testing.assert_close(
            ours.get_parameter(name).grad, gradient, rtol=0, atol=1e-10, msg=lambda m, n=name: n + m
        )


def test_padding_on_the_right_is_the_attention_mask_of_gpt2():
    theirs = oracle("eager")
    ours = create_model(SPEC, "transformer", positions="learned", depth=DEPTH, width=D, heads=H, dtype=torch.float64)
    given = dict(theirs.named_parameters())
    ours.load_state_dict({name: given[other].T if turned else given[other] for name, other, turned in names()})
    mask = torch.arange(L) < torch.tensor([[L], [11], [1]])
    tokens = torch.randint(V, (3, L))
    expected = theirs(tokens, attention_mask=mask.long()).logits
    torch.testing.assert_close(ours(tokens, mask)[mask], expected[mask], rtol=0, atol=1e-10)


def test_a_gpt2_with_las_attention_is_a_model_of_ours_with_las():
    import longlens.integrations.huggingface  # noqa: F401 (registers)

    theirs = oracle("las")
    theirs.config.las |= {"max_rate": 0.2, "window": 3}
    ours = create_model(
        SPEC, "las", positions="learned", depth=DEPTH, width=D, heads=H, max_rate=0.2, window=3, dtype=torch.float64
    )
    given = dict(theirs.named_parameters())
    ours.load_state_dict({name: given[other].T if turned else given[other] for name, other, turned in names()})
    tokens = torch.randint(V, (3, L))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-10)
