"""Text comes out of a language model: in its symbols, piece by piece, and the same for the same seed."""

import numpy as np
import pytest
import torch
from support.data import home  # noqa: F401 (a fixture)

from longlens import create_task, load_run, train
from longlens.data.codec import Codec
from longlens.errors import BadInput
from longlens.models.config import Writing
from longlens.models.decode import Decoder, write
from longlens.models.model import create_model
from longlens.tasks.base import Spec
from longlens.tasks.language import Enwik8, Text8
from longlens.training.generate import Continuation

WORDS = ["the", "cat", "<eos>", "sat", "<unk>", "=", "Héctor"]


def language(description, mixer="las", **options):
    """A model that has learned nothing, and the codec of its task."""
    spec = Spec("tokens", len(description["symbols"]), 16, "language", len(description["symbols"]), "perplexity")
    return create_model(spec, mixer, depth=1, width=16, heads=2, **options).eval(), Codec.make(spec, description)


def wikitext():
    """As the task of WikiText describes itself, but for the number of its words."""
    lines = [("\n", " <eos> ")]
    return {"form": "words", "symbols": WORDS, "unknown": 4, "knows_unknown": True, "replace": lines}


def test_letters():
    text = Continuation(*language(Text8().codec()), "the cat ", Writing(tokens=40))
    written = "".join(text)
    assert text.prompt == "the cat "
    assert len(written) == 40
    assert set(written) <= set(Text8().vocabulary())
    assert "".join(text) == written, "each loop begins anew"


@pytest.mark.parametrize("prompt", ["Zürich €", "a"])
def test_bytes_are_the_text_that_they_are_together(prompt):
    """Most of a model that knows nothing are no characters; those at the end of a text are not lost, either."""
    model, codec = language(Enwik8().codec())
    writing = Writing(tokens=60, temperature=3, top_k=None, top_p=1)
    pieces = [*Continuation(model, codec, prompt, writing)]
    tokens = [*write(Decoder(model), list(prompt.encode()), writing)]
    assert "".join(pieces) == bytes(tokens).decode(errors="replace")
    assert all(pieces)
    assert len(pieces) > 10


def test_words_have_spaces_and_lines(monkeypatch):
    model, codec = language(wikitext())
    text = Continuation(model, codec, "= Héctor =\nthe dog", Writing(tokens=6))
    assert text.tokens == [5, 6, 5, 2, 0, 4]
    assert text.prompt == "= Héctor =\nthe <unk>"
    monkeypatch.setattr("longlens.training.generate.write", lambda *_: iter([3, 2, 2, 1, 3, 2]))
    assert [*text] == [" sat", "\n", "\n", "cat", " sat", "\n"]


def test_what_to_know_is_said_before():
    model, codec = language(Text8().codec())
    assert Continuation(model, codec, "the ", Writing(tokens=12)).notes == []
    (note,) = Continuation(model, codec, "the ", Writing(tokens=13)).notes
    assert note.startswith("the model sees at most 16 tokens, as in training: when there are more, it starts again")
    first, second = Continuation(model, codec, "the ", Writing(tokens=40, context=20)).notes
    assert first == "the model was trained on at most 16 tokens: after more it may write worse"
    assert second.startswith("the model sees at most 20 tokens, as asked for")
    assert Continuation(model, codec, "the ", Writing(tokens=40, context=44)).notes == [first]
    assert Continuation(model, codec, "the ", Writing(tokens=12, context=44)).notes == []
    spec = model.spec
    hyena = create_model(spec, "hyena", depth=1, width=16).eval()
    (note,) = Continuation(hyena, codec, "the ", Writing(tokens=2)).notes
    assert note == "hyena has no step: it reads the whole text again for each token, which is slow"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "prompt must have at least one symbol to go on from, got none"),
        ([], "prompt must have at least one symbol to go on from, got none"),
        ("The cat", "prompt must have symbols of the training set, got 'T' at position 1"),
        ([3, 27], "prompt must have tokens from 0 to 26, got 3 to 27"),
    ],
)
def test_a_prompt_that_cannot_be(prompt, said):
    with pytest.raises(BadInput, match=said):
        Continuation(*language(Text8().codec()), prompt, Writing())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a short text8, of which nothing but the folder is left."""
    folder = tmp_path_factory.mktemp("text8")
    random = np.random.default_rng(0)
    (folder / "text8").write_bytes(
        random.choice(list(b" abcdefghijklmnopqrstuvwxyz"), size=4000).astype("u1").tobytes()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGLENS_HOME", str(folder / "home"))
        task = create_task("text8", stand_in=True, max_length=32)
        task.prepare(folder)
        result = train(task, "las", recipe="smoke", steps=2, evaluate_every=1, threads=1, runs=str(folder / "runs"))
    return load_run(result.folder)


def test_a_run_writes(run):
    written = run.generate("once upon a time ", tokens=50, seed=4)
    assert written == run.generate("once upon a time ", tokens=50, seed=4) != run.generate("once ", tokens=50, seed=5)
    assert "".join(run.stream("once upon a time ", tokens=50, seed=4, checkpoint="last")) == written
    assert len(written) == 50


@torch.no_grad()
def test_the_likeliest_letters_are_those_of_the_model(run):
    """By hand, a forward pass for each letter."""
    model, text = run.model(), run.codec.encode("once", "here").tolist()
    for _ in range(20):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    expected = "".join(run.codec.symbols[token] for token in text[4:])
    assert run.generate("once", tokens=20, temperature=0) == expected


def test_options_are_checked_before_the_first_token(run):
    for options, said in (
        ({"temprature": 1}, "generate has no option 'temprature'; did you mean 'temperature'"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, got 0"),
        ({"tokens": 0}, "tokens must be a whole number of at least 1, got 0"),
        ({"checkpoint": "7"}, "checkpoint must be one of best, last, 1, 2, got 7"),
    ):
        with pytest.raises(BadInput, match=said):
            run.stream("once", **options)


def test_only_a_language_model_writes(tmp_path):
    how = {"recipe": "smoke", "steps": 1, "threads": 1, "runs": str(tmp_path)}
    classifier = train("listops", "las", **{"task.sizes": (8, 8, 8)}, **how).run
    with pytest.raises(BadInput, match=r"generate needs a language model, as those of text8.* classify: use predict"):
        classifier.generate("[MAX 1 2 ]")
