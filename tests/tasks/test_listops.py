"""ListOps: the arena's rules, and an evaluator that agrees with the definition and with published labels."""

import hashlib
from itertools import pairwise

import numpy as np
import pytest

from longlens.data.datasets import offsets_of
from longlens.tasks.base import create_task
from longlens.tasks.listops import (
    CLOSE,
    EOS,
    MIN,
    VOCABULARY,
    draw_tree,
    evaluate,
    evaluate_reference,
    tokenize,
)

SHORT = {"min_length": 3, "max_length": 60, "max_depth": 4}


def words(tokens):
    return [VOCABULARY[token] for token in tokens]


def expressions(shard):
    return [shard.values[low:high] for low, high in pairwise(offsets_of(shard.lengths))]


def evaluated(*texts):
    tokens = [tokenize(text) for text in texts]
    return evaluate(np.concatenate(tokens), np.array([len(t) for t in tokens])).tolist()


@pytest.fixture(scope="module")
def arena():
    """Four shards by the arena's rules."""
    task = create_task("listops")
    return [task.shard(index) for index in range(4)]


def test_the_vocabulary_has_15_symbols_and_3_special_tokens():
    assert len(VOCABULARY) == 18
    assert len(set(VOCABULARY)) == 18
    assert create_task("listops").spec.size == 18


def test_expressions_done_by_hand():
    assert evaluated("[MAX 2 9 [MIN 4 7 ] 0 ]", "[SM 9 9 9 ]", "[MED 1 2 ]", "[MED 9 1 5 ]", "7") == [9, 7, 1, 5, 7]


@pytest.mark.parametrize("options", [{}, SHORT, SHORT | {"max_args": 2}, {"max_depth": 6, "min_length": 100}])
def test_the_evaluator_agrees_with_the_definition(options):
    shard = create_task("listops", **options).shard(3)
    for tokens, label in list(zip(expressions(shard), shard.labels, strict=True))[:200]:
        assert evaluate_reference(words(tokens)) == label


def test_labels_agree_with_published_ones(real_data):
    """20,000 expressions of Nangia & Bowman, with their labels."""
    folder = real_data("listops")
    for file in ("test_d20s.tsv", "test_d20a.tsv"):
        lines = [line.split("\t") for line in (folder / file).read_text().splitlines()]
        assert len(lines) == 10_000
        assert evaluated(*(expression for _, expression in lines)) == [int(label) for label, _ in lines]


def test_lengths_follow_the_arena(arena):
    """The quantiles of the arena's own script; 4000 samples stray by about 2 %."""
    lengths = np.concatenate([shard.lengths for shard in arena])
    assert lengths.min() > 500
    assert lengths.max() < 2000
    np.testing.assert_allclose(
        np.quantile(lengths, [0.05, 0.25, 0.5, 0.75, 0.95]), [543, 714, 966, 1320, 1799], rtol=0.04
    )


def test_labels_follow_the_arena(arena):
    share = np.bincount(np.concatenate([shard.labels for shard in arena]), minlength=10) / 4000
    np.testing.assert_allclose(share[[0, 9]], 0.17, atol=0.02)
    assert share[1:9].min() > 0.06
    assert share[1:9].max() < 0.105


def test_trees_keep_the_rules(arena):
    for tokens in expressions(arena[0])[:200]:
        depth, deepest, arguments, counts = 0, 0, [0], []
        for token in tokens:
            if token == CLOSE:
                depth -= 1
                counts.append(arguments.pop())
            else:
                arguments[-1] += 1
                deepest = max(deepest, depth + 1)
                if token >= MIN:
                    depth += 1
                    arguments.append(0)
        assert depth == 0
        assert deepest <= 10
        assert min(counts) >= 2
        assert max(counts) <= 10


def test_three_quarters_of_the_inner_nodes_are_digits():
    """Without a rule for the length, so that nothing is selected."""
    shard = create_task("listops", max_depth=3, max_args=2, min_length=0, max_length=100).shard(0)
    second_level = [tokens[1] for tokens in expressions(shard)]
    assert np.mean([token < MIN for token in second_level]) == pytest.approx(0.75, abs=0.04)
    assert np.bincount(shard.values[shard.values >= MIN])[MIN:CLOSE].min() > 300  # all four operations


def test_the_bytes_are_fixed():
    """A promise: the same seed gives the same bytes on any machine, with any version."""
    shard = create_task("listops").shard(0)
    digest = hashlib.sha256(shard.values.tobytes() + shard.lengths.tobytes() + shard.labels.tobytes()).hexdigest()
    assert digest == "dc8201be2520a5e54b90ae96daa4d7a6aa85395bdff6ea7261d854f75a2631e3"


def test_other_seeds_and_shards_give_other_expressions():
    digests = {
        hashlib.sha256(create_task("listops", seed=seed, **SHORT).shard(index).values.tobytes()).hexdigest()
        for seed in (0, 1)
        for index in (0, 1)
    }
    assert len(digests) == 4


def test_samples_end_with_eos_and_keep_their_brackets():
    task = create_task("listops", sizes=(50, 10, 10), **SHORT)
    batch = next(iter(task.batches("train", 8)))
    for tokens, length, label in zip(batch.inputs, batch.lengths, batch.targets, strict=True):
        assert tokens[length - 1] == EOS
        assert (tokens[length:] == 0).all()
        assert evaluate_reference(words(tokens[: length - 1])) == label
    assert task.spec.max_length == 60
    assert task.split("train").lengths.max() <= 60


def test_brackets_and_parentheses_of_written_expressions():
    assert words(tokenize("( ( ( [SM 6 ) 5 ) ] )")) == ["[SM", "6", "5", "X"]
    assert words(tokenize("[MAX 1 2]")) == ["[MAX", "1", "2", "X"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[MAX 1 2", "brackets are not balanced"),
        ("[MAX 1 2 ] ]", "brackets are not balanced"),
        ("] [MAX 1 2", "brackets are not balanced"),
        ("1 2", "brackets are not balanced"),
        ("[MAX ]", "no arguments"),
        ("[MAX 1 ] [MIN 2 ]", "brackets are not balanced"),
        ("", "empty"),
        ("]", "brackets are not balanced"),
    ],
)
def test_expressions_that_are_not_well_formed(text, reason):
    with pytest.raises(ValueError, match=f"expression 2 cannot be evaluated: .*{reason}"):
        evaluated("[MAX 1 2 ]", text, "3")


def test_an_unknown_symbol():
    with pytest.raises(ValueError, match="'FOO' is not a symbol of ListOps"):
        tokenize("[MAX FOO 1 ]")
    with pytest.raises(ValueError, match="a token that is not of ListOps"):
        evaluate(np.array([EOS]), np.array([1]))


def test_a_tree_is_drawn_with_its_values():
    assert draw_tree(tokenize("[MAX 2 [MIN 4 [SM 9 9 ] ] 1 ]")) == ("MAX 2 · 1  = 4\n  MIN 4 ·  = 4\n    SM 9 9  = 8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_args": 1}, "max_args must be a whole number of at least 2, got 1"),
        ({"max_depth": 1}, "max_depth must be a whole number of at least 2, got 1"),
        ({"max_args": 10**30}, "max_args must be a whole number of at least 2, got 10{30}, which is too large"),
        ({"max_args": 100_000}, "max_args must be smaller with max_depth=10 and max_length=2000, got 100000"),
        ({"max_args": 2**31 - 1, "max_depth": 2}, "max_args must be smaller"),
        ({"max_args": 40, "max_depth": 2**31 - 1, "max_length": 2**24}, "max_args must be smaller"),
        ({"min_length": -1}, "min_length must be"),
        ({"seed": 2**63}, "seed must be"),
        ({"min_length": 100, "max_length": 101}, "no expression of depth 10"),
        ({"max_depth": 3, "max_args": 3}, "the longest 17"),
        ({"sizes": (10, 0, 10)}, "sizes must be 3 values, each a whole number of at least 1"),
        ({"sizes": (10, 10)}, "sizes must be 3 values"),
        ({"max_lenght": 10}, "did you mean 'max_length'"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(ValueError, match=message):
        create_task("listops", **options)


def test_the_longest_expression_is_as_long_as_said():
    """17 tokens for depth 3 with 3 arguments: 4 operations of 2 tokens, and 9 digits."""
    shard = create_task("listops", max_depth=3, max_args=3, min_length=16, max_length=100).shard(0)
    assert set(shard.lengths.tolist()) == {17}


def test_a_range_that_is_too_rare():
    with pytest.raises(ValueError, match="too rare"):
        create_task("listops", max_depth=10, max_args=2, min_length=1000, max_length=1100).shard(0)


def release(folder, test="[MAX 1 2 ]\t2\n"):
    folder.mkdir()
    (folder / "basic_train.tsv").write_text("Source\tTarget\n( ( [SM 9 ) 9 ) ]\t8\n[MIN 3 4 ]\t3\n")
    (folder / "basic_val.tsv").write_text("Source\tTarget\n5\t5\n")
    (folder / "basic_test.tsv").write_text("Source\tTarget\n" + test)
    return folder


def test_the_files_of_the_release_are_imported(tmp_path):
    task = create_task("listops", release=True, sizes=(2, 1, 1))
    task.prepare(release(tmp_path / "lra"))
    assert [len(task.split(name)) for name in ("train", "valid", "test")] == [2, 1, 1]
    samples = task.split("train").take(np.arange(2))
    assert words(samples.inputs[0]) == ["[SM", "9", "9", "X", "<eos>"]
    assert samples.targets.tolist() == [8, 3]


@pytest.mark.slow
def test_expressions_of_any_depth(tmp_path):
    """Deeper than two bytes count, and than Python recurses."""
    depth = 33_000
    text = "[MAX " * depth + "7 " + "] " * depth
    task = create_task("listops", release=True, sizes=(2, 1, 1), max_length=200_000)
    task.prepare(release(tmp_path / "lra", f"{text}\t7\n"))
    shown = task.render(task.split("test").take(np.array([0])), 0)
    assert shown.startswith("MAX ·  = 7\n  MAX ·  = 7\n    MAX")
    assert shown.endswith("MAX 7  = 7\n= 7")


def test_more_levels_than_any_tree_has_change_nothing():
    options = {"min_length": 5, "max_length": 60}
    shards = [create_task("listops", max_depth=depth, **options).shard(0) for depth in (40, 10**6, 2**31 - 1)]
    for shard in shards[1:]:
        assert shard.values.tobytes() == shards[0].values.tobytes()


def test_lines_may_end_as_the_arenas_csv_writer_ends_them(tmp_path):
    folder = release(tmp_path / "lra")
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    task = create_task("listops", release=True, sizes=(2, 1, 1))
    task.prepare(folder)
    assert task.split("train").targets.tolist() == [8, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[MAX 1 2 ]\t1\n", "label of expression 1 is not its value"),
        ("[MAX 1 2 ]\t12\n", "line 2: the label must be a digit, got '12'"),
        ("[MAX 1 2 ]\n", "line 2: the label must be a digit, got"),
        ("[MAX 1 2 ]\t2\n[MAX 1 2 ]\t2\n", "line 3 is one more than the 1 expressions that sizes ask for"),
        ("[MAX 1 2\t2\n", "expression 1 cannot be evaluated: its brackets are not balanced"),
        ("[MAX 1 Z ]\t2\n", "line 2: 'Z' is not a symbol"),
    ],
)
def test_a_damaged_release_leaves_nothing_behind(tmp_path, home, line, message):
    task = create_task("listops", release=True, sizes=(2, 1, 1))
    with pytest.raises(ValueError, match=message):
        task.prepare(release(tmp_path / "lra", line))
    assert not task.is_prepared()
    assert [path.suffix for path in (home / "sets").iterdir()] == [".lock"]


def test_the_release_needs_a_folder_and_its_counts(tmp_path):
    with pytest.raises(ValueError, match=r"run 'longlens data prepare listops --release --from DIR', .*lra_release.gz"):
        create_task("listops", release=True).prepare()
    with pytest.raises(ValueError, match=r"there is no file basic_train.tsv in .*: it is in lra_release.gz"):
        create_task("listops", release=True).prepare(tmp_path)
    with pytest.raises(ValueError, match=r"basic_train.tsv in .* has 2 expressions, and sizes ask for 96,000"):
        create_task("listops", release=True).prepare(release(tmp_path / "lra"))


def test_options_that_a_release_does_not_follow_are_refused(tmp_path):
    with pytest.raises(ValueError, match="max_depth shapes generated samples only"):
        create_task("listops", release=True, max_depth=5)
    task = create_task("listops", release=True, sizes=(2, 1, 1), max_length=4)
    task.prepare(release(tmp_path / "lra"))
    with pytest.raises(ValueError, match="max_length must be at least 5, the longest expression and its end, got 4"):
        task.split("train")
