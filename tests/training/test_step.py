"""The optimizer's groups, and a step: in parts, clipped, in another precision."""

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from longlens.data.datasets import (
    IGNORE,
    Batch,
    Images,
    Joined,
    Samples,
    Sequences,
    Split,
    Subset,
    Windows,
    offsets_of,
)
from longlens.errors import BadInput
from longlens.mixers.registry import create_mixer, find_mixer, list_mixers
from longlens.models.model import create_model
from longlens.tasks.base import Spec, Task, create_task
from longlens.training.config import TrainingConfig
from longlens.training.machine import Processes
from longlens.training.step import (
    class_weights,
    forward,
    in_bfloat16,
    load_split,
    make_optimizer,
    prefetch,
    set_learning_rate,
    train_step,
    training_set,
)

ALONE = Processes(0, 1, torch.device("cpu"))


class StateSpace(nn.Module):
    kernel_parameters = ("rates", "filter.0.weight")
    no_decay = ("skip", "filter.1.weight", "optional")

    def __init__(self):
        super().__init__()
        self.rates, self.matrix = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4, 4))
        self.skip, self.vector = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.ones(4))
        self.bias = nn.Parameter(torch.ones(2, 4))
        self.optional = None
        self.filter = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([StateSpace(), nn.LayerNorm((4, 4))])


def groups_of(model, **options):
    """The peak of the learning rate and the weight decay of each parameter."""
    optimizer = make_optimizer(model, TrainingConfig(steps=1, **options))
    return optimizer, {
        name: (group["peak"], group["weight_decay"])
        for group in optimizer.param_groups
        for name, parameter in model.named_parameters()
        if any(parameter is member for member in group["params"])
    }


def test_matrices_decay_and_norms_biases_vectors_and_named_parameters_do_not():
    optimizer, found = groups_of(Whole(), lr=0.01, kernel_lr=0.002, weight_decay=0.1)
    kernel, decays, plain = (0.002, 0.0), (0.01, 0.1), (0.01, 0.0)
    assert found == {
        "layers.0.rates": kernel,
        "layers.0.matrix": decays,
        "layers.0.skip": plain,
        "layers.0.vector": plain,
        "layers.0.bias": plain,
        "layers.0.filter.0.weight": kernel,
        "layers.0.filter.0.bias": plain,
        "layers.0.filter.1.weight": plain,
        "layers.0.filter.1.bias": plain,
        "layers.0.filter.2.weight": decays,
        "layers.0.filter.2.bias": plain,
        "layers.1.weight": plain,
        "layers.1.bias": plain,
    }
    set_learning_rate(optimizer, 0.5)
    assert sorted(group["lr"] for group in optimizer.param_groups) == [0.001, 0.005, 0.005]


@pytest.mark.parametrize("name", list_mixers())
def test_no_bias_or_norm_of_a_mixer_decays(name):
    """Beside matrices of linear maps, embeddings and convolutions only what a layer does not name."""
    model = create_mixer(name, 16, **({"heads": 2} if "heads" in find_mixer(name).options else {}))
    _, found = groups_of(model, weight_decay=0.1)
    assert len(found) == len(list(model.parameters()))
    for parameter, (_, decay) in found.items():
        last = parameter.rpartition(".")[2]
        assert not (decay and ("bias" in last or last in ("scale", "offset", "skip", "gamma", "beta"))), parameter


def test_kernel_parameters_never_learn_faster_than_the_others():
    optimizer, _ = groups_of(Whole(), lr=1e-4, kernel_lr=1e-3)
    assert {group["peak"] for group in optimizer.param_groups} == {1e-4}


@pytest.mark.parametrize("attribute", ["kernel_parameters", "no_decay"])
def test_a_layer_that_names_a_parameter_which_it_has_not_is_a_sentence(attribute):
    layer = nn.Linear(4, 4)
    setattr(layer, attribute, ("rates",))
    with pytest.raises(BadInput, match=f"{attribute} of Linear names 'rates', and it has no such parameter"):
        groups_of(nn.Sequential(layer))


def gradients(task, options, weights=None, **model_options):
    """Of a step, and its loss."""
    torch.manual_seed(0)
    model = create_model(task, "las", depth=1, width=16, heads=2, **model_options)
    optimizer = make_optimizer(model, options)
    (batch, *_) = task.batches("train", options.batch_size, shuffle=True)
    loss = train_step(model, task.spec, optimizer, batch, options, ALONE, weights)
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return loss, found, model, batch


@pytest.mark.parametrize("parts", [2, 3, 5])  # 5 samples: of unequal parts, and one sample each
def test_a_batch_in_parts_has_the_same_loss_and_gradient(parts, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path))
    task = create_task("listops", sizes=(8, 4, 4), min_length=4, max_length=32, max_depth=3, max_args=4)
    whole, wanted, *_ = gradients(task, TrainingConfig(steps=1, batch_size=5))
    loss, found, *_ = gradients(task, TrainingConfig(steps=1, batch_size=5, accumulate=parts))
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_classes_that_are_balanced_count_the_same(listops):
    """By scikit-learn's formula; a class that is not there has no say."""
    options = TrainingConfig(steps=1, batch_size=5, class_weights="balanced")
    assert class_weights(listops, TrainingConfig(steps=1)) is None
    weights = class_weights(listops, options)
    targets = listops.split("train").take(np.arange(len(listops.split("train")))).targets
    present = np.unique(targets)
    wanted = compute_class_weight("balanced", classes=present, y=targets)
    np.testing.assert_allclose(weights[present], wanted, rtol=1e-12)
    assert weights[targets].mean().item() == pytest.approx(1)
    with pytest.raises(BadInput, match=r"class_weights must be none, as atomic-cumsum .* has no classes, got balanced"):
        class_weights(create_task("atomic-cumsum", max_length=8), options)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_weights_of_classes_are_those_of_the_loss_in_any_number_of_parts(parts, listops):
    weights = torch.linspace(0.1, 3, 10, dtype=torch.float64)
    loss, found, _, batch = gradients(listops, TrainingConfig(steps=1, batch_size=5, accumulate=parts), weights)
    torch.manual_seed(0)
    model = create_model(listops, "las", depth=1, width=16, heads=2)
    each = nn.functional.cross_entropy(model(batch.inputs, batch.mask), batch.targets, reduction="none")
    wanted = (each * weights[batch.targets].float()).sum() / 5
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(found, {n: p.grad for n, p in model.named_parameters()}, rtol=1e-4, atol=1e-6)


def test_the_loss_of_a_step_is_the_mean_over_its_samples():
    task = create_task("atomic-cumsum", max_length=16, sizes=(8, 4, 4))
    loss, _, _, batch = gradients(task, TrainingConfig(steps=1, batch_size=5))
    torch.manual_seed(0)
    model = create_model(task, "las", depth=1, width=16, heads=2)
    torch.testing.assert_close(loss, (model(batch.inputs) - batch.targets).square().mean().detach())


def test_clipping_bounds_the_norm_and_keeps_the_direction():
    task = create_task("atomic-cumsum", max_length=16, sizes=(8, 4, 4))
    _, free, *_ = gradients(task, TrainingConfig(steps=1, batch_size=8))
    _, clipped, *_ = gradients(task, TrainingConfig(steps=1, batch_size=8, clip=0.01))
    norm = torch.stack([gradient.norm() for gradient in free.values()]).norm()
    assert norm > 0.01
    torch.testing.assert_close(clipped, {name: g * (0.01 / norm) for name, g in free.items()}, rtol=1e-3, atol=1e-8)


def test_bfloat16_computes_in_it_and_keeps_weights_in_float32():
    task = create_task("atomic-cumsum", max_length=16, sizes=(8, 4, 4))
    whole, *_ = gradients(task, TrainingConfig(steps=1, batch_size=8))
    loss, found, model, _ = gradients(task, TrainingConfig(steps=1, batch_size=8, precision="bfloat16"))
    assert loss != whole
    torch.testing.assert_close(loss, whole, rtol=0.05, atol=0)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_auto_is_bfloat16_only_where_the_hardware_has_it(monkeypatch):
    """torch says yes also for a GPU that can only emulate it, unless it is asked without emulation."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not in_bfloat16("auto", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert in_bfloat16("auto", torch.device("cuda"))
    assert not in_bfloat16("auto", torch.device("cpu"))
    assert not in_bfloat16("float32", torch.device("cuda"))
    assert in_bfloat16("bfloat16", torch.device("cpu"))


def test_batches_are_prefetched_in_their_order_and_errors_arrive():
    def numbers():
        yield from range(5)
        raise OSError("the disk is gone")

    batches = prefetch(numbers(), torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    assert [next(batches) for _ in range(5)] == list(range(5))
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_batches_for_a_gpu_are_pinned_and_copied_without_waiting(monkeypatch):
    task = create_task("atomic-cumsum", max_length=16, sizes=(8, 4, 4))
    pinned, copied = [], []

    def pin(tensor):
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    (batch,) = prefetch(task.batches("train", 8), torch.device("cpu"))
    assert not pinned
    (batch,) = prefetch(task.batches("train", 8), torch.device("cuda"))
    assert len(pinned) == 4

    monkeypatch.setattr(Batch, "to", lambda self, device, *, non_blocking=False: copied.append(non_blocking) or self)
    forward(lambda inputs, mask: inputs, batch, "float32", ALONE)  # pyright: ignore[reportArgumentType]
    assert copied == [True]


class Grouped(StateSpace):
    groups: ClassVar = {"ssm": ("rates", "matrix"), "filter": ("filter.0.weight", "filter.2.bias", "optional")}


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Grouped(), nn.Conv1d(4, 4, 1, groups=2), Grouped()])


def test_a_group_has_its_own_rate_and_decay():
    """What the config leaves open stays as without groups: matrix decays, and rates, of the kernel, do not."""
    groups = {"ssm": {"lr": 0.02}, "filter": {"lr": 0.003, "weight_decay": 0.3}}
    _, plain = groups_of(Deep(), lr=0.01, kernel_lr=0.002, weight_decay=0.1)
    _, found = groups_of(Deep(), lr=0.01, kernel_lr=0.002, weight_decay=0.1, groups=groups)
    own = {"rates": (0.02, 0.0), "matrix": (0.02, 0.1), "filter.0.weight": (0.003, 0.3), "filter.2.bias": (0.003, 0.3)}
    own = {f"layers.{index}.{name}": value for index in (0, 2) for name, value in own.items()}
    assert found == plain | own
    assert found["layers.1.weight"] == (0.01, 0.1)
    _, found = groups_of(Deep(), lr=0.01, kernel_lr=0.002, weight_decay=0.1, groups={"ssm": {"weight_decay": 0.0}})
    assert found["layers.0.rates"] == (0.002, 0.0)
    assert found["layers.2.matrix"] == (0.01, 0.0)


@pytest.mark.parametrize(
    ("name", "options", "members"),
    [
        ("s4", {}, {"ssm": ["log_decay", "frequency", "p", "b"], "dt": ["log_dt"]}),
        ("s5", {}, {"ssm": ["eigenvalues"], "b": ["into"], "dt": ["log_dt"]}),
        ("dss", {}, {"ssm": ["real", "imag"], "c": ["weights"], "dt": ["log_dt"]}),
        ("dlr", {}, {"ssm": ["damping", "angles"], "c": ["weights"]}),
        ("gss", {}, {"ssm": ["real", "imag"], "c": ["c"]}),
        ("lru", {}, {"ssm": ["log_decay", "log_phase", "log_scale"], "b": ["into"]}),
        ("h3", {}, {"ssm": ["a_real", "a_imag"], "dt": ["log_dt"], "shift": ["shift"]}),
        ("h3", {"learn_shift": False}, {"ssm": ["a_real", "a_imag"], "dt": ["log_dt"]}),
    ],
)
def test_the_parameters_of_a_state_space_are_in_groups(name, options, members):
    """Each group has its own rate and decay, and what is in none has those of the rest: together they are all that has
    the rate of a kernel without groups."""
    layer, how = create_mixer(name, 16, **options), {"lr": 0.01, "kernel_lr": 0.002, "weight_decay": 0.1}
    _, plain = groups_of(layer, **how)
    groups = {group: {"lr": 0.1 + place, "weight_decay": 0.5 + place} for place, group in enumerate(members)}
    _, found = groups_of(layer, **how, groups=groups)
    own = {name: (0.1 + place, 0.5 + place) for place, group in enumerate(members) for name in members[group]}
    assert found == plain | own
    assert own.keys() == {name for name, (rate, _) in plain.items() if rate == 0.002}
    with pytest.raises(BadInput, match="groups must be parameter groups of the layer, got 'none'"):
        groups_of(layer, groups={"none": {"lr": 1.0}})


def test_all_decay_but_what_is_named_as_a_kernel():
    _, found = groups_of(Whole(), lr=0.01, kernel_lr=0.002, weight_decay=0.1, decay_all=True)
    kernel = {"layers.0.rates", "layers.0.filter.0.weight"}
    assert {name: value for name, value in found.items() if value != (0.01, 0.1)} == dict.fromkeys(kernel, (0.002, 0.0))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"sms": {"lr": 1e-3}}, "groups must be parameter groups of the layer, got 'sms'; did you mean 'ssm'"),
        ({"ssm": {"lrr": 1e-3}}, "group 'ssm' has no option 'lrr'; did you mean 'lr'"),
        ({"ssm": {"lr": 0}}, "groups.ssm.lr must be a number above 0, got 0"),
        ({"ssm": {"lr": True}}, "groups.ssm.lr must be a number above 0, got True"),
        ({"ssm": 1e-3}, "groups must be a table of tables, or NAME.lr=… and NAME.weight_decay=… or none, got"),
        (("ssm.lr",), "groups must be a table of tables, or NAME.lr=… and NAME.weight_decay=… or none, got ssm.lr"),
    ],
)
def test_a_wrong_group_is_a_sentence(groups, message):
    with pytest.raises(BadInput, match=message):
        groups_of(Deep(), groups=groups)
    with pytest.raises(BadInput, match=r"got 'ssm'; there is none"):
        groups_of(Whole(), groups={"ssm": {"lr": 1.0}})


def test_groups_as_they_are_typed():
    typed = TrainingConfig(steps=1, groups=("ssm.lr=1e-3", "dt.weight-decay=0", "ssm.weight_decay=0.5"))
    assert typed.groups == {"ssm": {"lr": 1e-3, "weight_decay": 0.5}, "dt": {"weight_decay": 0.0}}


def test_the_optimizer_has_its_epsilon():
    """The first step of Adam is lr·g/(|g| + ε)."""
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = make_optimizer(model, TrainingConfig(steps=1, lr=0.1, eps=3.0))
    set_learning_rate(optimizer, 1.0)
    model.weight.grad = torch.full((1, 1), 2.0)
    optimizer.step()
    torch.testing.assert_close(before - model.weight, torch.full((1, 1), 0.1 * 2 / (2 + 3)))


@pytest.fixture
def listops(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGLENS_HOME", str(tmp_path / "home"))
    return create_task("listops", sizes=(60, 20, 10), min_length=3, max_length=20, max_depth=3, max_args=3)


def rows(split):
    """The samples of a split as texts."""
    samples = split.take(np.arange(len(split)))
    return [f"{row[:length].tolist()} {target}" for row, length, target in zip(*samples, strict=True)]


def test_smaller_training_sets_are_parts_of_larger_ones(listops):
    whole = rows(listops.split("train"))
    few, more = (rows(training_set(listops, TrainingConfig(steps=1, train_samples=count))) for count in (7, 23))
    assert (len(few), len(more)) == (7, 23)
    assert set(few) < set(more) < set(whole)
    assert rows(training_set(listops, TrainingConfig(steps=1, train_samples=60))) == whole
    assert rows(training_set(listops, TrainingConfig(steps=1, train_samples=1000))) == whole


def test_the_validation_set_can_be_trained_on_as_well(listops):
    joined = training_set(listops, TrainingConfig(steps=1, train_on_valid=True, train_samples=9))
    assert rows(joined)[9:] == rows(listops.split("valid"))
    assert len(joined) == 9 + 20
    assert joined.lengths.tolist() == [len(row.split(",")) for row in rows(joined)]
    mixed = np.array([28, 0, 12, 3])
    samples = joined.take(mixed)
    assert [f"{r[:n].tolist()} {t}" for r, n, t in zip(*samples, strict=True)] == [rows(joined)[i] for i in mixed]
    assert joined.count_targets(mixed) == 4
    assert len(joined.take(np.array([2])).targets) == 1, "samples of one of the two only"


def test_texts_are_joined_with_their_padding():
    first, second = Windows(np.arange(8), 5), Windows(np.arange(20, 33), 4)
    joined = Joined(first, second)
    found = joined.take(np.arange(len(joined)))
    assert found.inputs.shape == (5, 5)
    assert found.targets[1].tolist() == [6, 7, IGNORE, IGNORE, IGNORE]
    assert found.targets[4].tolist() == [29, 30, 31, 32, IGNORE]
    assert joined.count_targets(np.array([1, 4])) == 6


# What a task of one's own returns

BITS = Spec("tokens", 2, 6, "classify", 2, "accuracy")
LETTERS = Spec("tokens", 5, 6, "language", 5, "bits_per_byte")
CURVES = Spec("real", 3, 6, "regress", 1, "r2")
PAIRS = Spec("tokens", 2, 6, "match", 2, "accuracy")
ONES, CLASSES = np.ones((300, 6), np.int64), np.ones(300, np.int64)
REAL, NUMBERS = np.ones((300, 6, 3), np.float32), np.ones(300, np.float32)


class Arrays(Split):
    """Arrays as they are."""

    def __init__(self, inputs, targets, lengths=6 * CLASSES, returned: Callable = Samples):
        self.inputs, self.targets, self.each, self.returned = inputs, targets, lengths, returned

    def __len__(self):
        return len(self.targets)

    @property
    def lengths(self):
        return self.each

    def take(self, indices):
        return self.returned(self.inputs[indices], self.each[indices], self.targets[indices])


def own(spec, split):
    """A task that returns what it is given."""
    return type("Own", (Task,), {"name": "own", "spec": spec, "load": lambda *_: split})()


def but(array, value, row=-1):
    """The array with another value in a row."""
    changed = array.copy()
    changed[row] = value
    return changed


@pytest.mark.parametrize(
    ("spec", "split", "sentence"),
    [
        (BITS, (ONES, CLASSES), "split 'valid' of task 'own' must be a Split, such as .*datasets, got tuple"),
        (BITS, ONES, "split 'valid' of task 'own' must be a Split, .*, got ndarray"),
        (BITS, Images(ONES, CLASSES[:150], np.asarray), "a target for each sequence, .* got 300 sequences and 150 t"),
        (BITS, Images(ONES[:0], CLASSES[:0], np.asarray), "and one at least, got 0 sequences and 0 targets"),
        (BITS, Arrays(ONES, CLASSES, returned=lambda *a: a), r"must return Samples\(inputs, lengths, .*, got tuple"),
        (BITS, Arrays(ONES, CLASSES, but(CLASSES, 7, 1)), "the lengths of split .* must be from 0 to 6, as .*, got 7"),
        (BITS, Arrays(but(ONES, 2), CLASSES), "the inputs of split .* must be from 0 to 1, as its Spec says, got 2"),
        (BITS, Arrays(but(ONES, -1, 0), CLASSES), "the inputs of split .* must be from 0 to 1, as .*, got -1"),
        (BITS, Arrays(ONES.astype(np.uint8), CLASSES), r"must be int64 or int32 of shape \(64, length\), got uint8"),
        (BITS, Arrays(REAL, CLASSES), r"the inputs of .* shape \(64, length\), got float32 of shape \(64, 6, 3\)"),
        (BITS, Arrays(ONES, but(CLASSES, 4)), "the targets of split .* must be from 0 to 1, as its Spec says, got 4"),
        (BITS, Arrays(ONES, NUMBERS), r"the targets of .* must be int64 of shape \(64\), got float32"),
        (BITS, Arrays(ONES, CLASSES[:, None]), r"the targets of .* must be int64 of shape \(64\), got .* \(64, 1\)"),
        (LETTERS, Arrays(ONES, but(ONES, 5)), "the targets of split .* must be from 0 to 4, as its Spec says, got 5"),
        (LETTERS, Arrays(ONES, CLASSES), r"the targets of .* must be int64 of shape \(64, length\), got"),
        (CURVES, Arrays(but(REAL, np.nan), NUMBERS), "the inputs of split .* must be finite numbers, got nan"),
        (CURVES, Arrays(REAL.astype(float), NUMBERS), r"must be float32 of shape \(64, length, 3\), got float64"),
        (CURVES, Arrays(REAL[..., :2], NUMBERS), r"must be float32 of shape \(64, length, 3\), got .* \(64, 6, 2\)"),
        (CURVES, Arrays(REAL, but(NUMBERS, -np.inf)), "the targets of split .* must be finite numbers, got -inf"),
        (PAIRS, Arrays(ONES, CLASSES), r"must be int64 or int32 of shape \(64, 2, length\), got"),
    ],
)
def test_a_split_that_is_not_as_the_task_says_is_refused(spec, split, sentence):
    with pytest.raises(BadInput, match=sentence) as caught:
        load_split(own(spec, split), "valid")
    assert "split 'valid' of task 'own'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "split"),
    [
        (BITS, Images(ONES[:1], CLASSES[:1], np.asarray)),
        (BITS, Subset(Arrays(but(ONES, 2), CLASSES), np.arange(299))),
        (LETTERS, Windows(np.arange(100) % 5, 6)),
        (CURVES, Arrays(REAL, NUMBERS.astype(float))),
        (PAIRS, Sequences(ONES.ravel(), offsets_of(6 * CLASSES), CLASSES[:150], pairs=True)),
    ],
)
def test_a_split_that_is_as_the_task_says_is_taken(spec, split):
    assert load_split(own(spec, split), "train") is split


def test_of_a_large_split_few_values_are_looked_at():
    taken = []

    def returned(inputs, *others):
        taken.append(inputs.shape)
        return Samples(inputs, *others)

    split = Arrays(np.broadcast_to(ONES[:1, :1], (300, 2**19)), CLASSES, 2**19 * CLASSES, returned)
    load_split(own(Spec("tokens", 2, 2**19, "classify", 2, "accuracy"), split), "train")
    assert taken == [(2, 2**19)]
