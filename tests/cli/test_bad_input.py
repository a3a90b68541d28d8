"""Bad input is one sentence on stderr and exit code 2, and nothing is written."""

import re

import pytest

FORMS = re.compile(  # how a sentence says what is wrong
    r" (must (be|end in|have|name|divide) |unknown |unexpected |has no |has the option |needs |names |there is no "
    r"|is not |cannot |leave (it )?out)"
)

TABLE = r"""
# commands
bnech
    unknown command 'bnech'; did you mean 'bench'?
bench
    'longlens bench' must be followed by one of attention, layers, decode, model, data, packages
list mixer
    unknown command 'longlens list mixer'; did you mean 'mixers'?
data prepair
    unknown command 'longlens data prepair'; did you mean 'prepare'?
--nothing
    unknown flag --nothing; 'longlens --help' shows the commands
list tasks --x
    unknown flag --x; 'longlens list tasks --help' shows all
# names
train
    'longlens train' must be followed by a task:
train --recipe smoke listops
    'longlens train' must be followed by a task:
train lisops
    unknown task 'lisops'; did you mean 'listops'?
train listops --mixer lass
    unknown mixer 'lass'; did you mean 'las' or 'lssl'?
compare listops --mixers las trasformer
    unknown mixer 'trasformer'; did you mean 'transformer' or 'reformer'?
recipe show lisops
    unknown task 'lisops'; did you mean 'listops'?
recipe show listops big
    unknown scale 'big'; choose from smoke, mini, paper
list recipes lisops
    unknown task 'lisops'; did you mean 'listops'?
list mixers zzz
    unknown mixer 'zzz'; choose from
# flags
train atomic-cumsum --lrr 3
    unknown flag --lrr; did you mean --lr? 'longlens train atomic-cumsum --help' shows
train listops --batchsize 3
    unknown flag --batchsize; did you mean --batch-size
train listops --unknown
    unknown flag --unknown; 'longlens train listops --help' shows all
train listops --no-threads
    unknown flag --no-threads; did you mean --threads
train listops extra
    unexpected argument 'extra'
train listops --tensorboard yes
    unexpected argument 'yes'
train listops --tensorboard=yes
    --tensorboard/--no-tensorboard must be without a value, got 'yes'
train listops --recipe
    --recipe must be followed by one value ('longlens train listops --help' shows all flags)
train listops --mixer
    --mixer must be followed by one value
train listops --wandb
    --wandb must be followed by one value
train listops --betas 0.9
    --betas must be followed by 2 values
evaluate
    RUN must be given
evaluate . --checkpoint
    --checkpoint must be followed by one value
evaluate . --split tset
    --split must be one of train, valid, test, got tset
compare listops --folder x
    unknown flag --folder;
train listops --mixer s4d --mixer.window 3
    mixer 's4d' has no option 'window'; choose from state-size,
compare listops --mixers s4d s5 --mixer.windw 3
    none of s4d, s5 has the option 'windw'; choose from
train listops --task.max-lenght 3
    task 'listops' has no option 'max-lenght'; did you mean 'max-length'
# numbers
train listops --threads 0
    --threads must be a whole number of at least 1 or none, got 0
train listops --threads -2
    --threads must be a whole number of at least 1 or none, got -2
train listops --steps 2.5
    --steps must be a whole number of at least 1 or none, got 2.5
train listops --steps none --epochs none
    one of epochs, steps and minutes must be given
train atomic-cumsum --steps 5 --epochs 1
    one of epochs, steps and minutes must be given, got epochs=1.0 and steps=5
train atomic-cumsum --lr fast
    --lr must be a number above 0, got fast
train atomic-cumsum --lr -1e-3
    --lr must be a number above 0, got -1e-3
train atomic-cumsum --lr nan
    --lr must be a number above 0, got nan
train atomic-cumsum --lr inf
    --lr must be a number above 0, got inf, which is too large
train atomic-cumsum --lr=
    --lr must be a number above 0, got ''
train listops --betas 1 1
    --betas must be 2 values, each a number of at least 0 and below 1, got 1 1
train atomic-cumsum --depth 0
    --depth must be a whole number from 1 to 10,000, got 0
train listops --depth 100000000000000000000000
    --depth must be a whole number from 1 to 10,000, got 100000000000000000000000
train listops --width 4000000000000000000
    --width must be a whole number from 1 to 2^20, got 4000000000000000000
train listops --width 4e18
    --width must be a whole number from 1 to 2^20, got 4e18
train listops --ffn-ratio 1e308
    --ffn-ratio must be a number above 0, at most 1000, got 1e308
train listops --epochs 1e308
    --epochs must be a number above 0, at most 10^9 or none, got 1e308
train listops --seed 99999999999999999999999
    --seed must be a whole number from 0 to 2^63 - 1, got 99999999999999999999999
train listops --accumulate 100
    accumulate must be at most the batch_size, 50, got 100
compare listops --seeds a b
    --seeds must be a list, each a whole number from 0 to 2^63 - 1, got a b
train atomic-cumsum --task.max-length 0
    --task.max-length must be a whole number from 1 to 16,777,216, got 0
train atomic-cumsum --task.length 0
    --task.max-length must be a whole number from 1 to 16,777,216, got 0
train atomic-cumsum --mixer.window 4
    --mixer.window must be an odd number of at least 1
train atomic-cumsum --mixer.heads 7
    heads must divide the width of the layer, got heads=7
compare atomic-cumsum --mixer.heads 7
    heads must divide the width of the layer, got heads=7
train listops --mixer las-chunk --mixer.chunk-size none
    --mixer.chunk-size must be a whole number of at least 1,
bench attention --window 4
    --window must be an odd number of at least 1, got 4
bench attention --heads 0
    --heads must be a whole number of at least 1, got 0
bench attention --rounds 0
    --rounds must be a whole number of at least 1, got 0
bench attention --lengths 0
    --lengths must be none or a list, each a whole number of at least 1, got 0
bench attention --lengths abc
    --lengths must be none or a list, each a whole number of at least 1, got abc
bench attention --lenghts 3
    unknown flag --lenghts; did you mean --lengths?
bench attention --device tpu
    --device must be one of auto, cpu, cuda, got tpu
bench model --depth 0
    --depth must be a whole number of at least 1, got 0
bench layers --mixers s4e
    unknown mixer 's4e'; did you mean 's4'
bench layers --lengths 0
    --lengths must be a list, each a whole number of at least 1, got 0
bench packages --packages linform
    unknown package 'linform'; did you mean 'linformer'?
bench data --tasks lisops
    unknown task 'lisops'; did you mean 'listops'?
list mixers --traits --length 3
    length must be at least 16, got 3
figures eld --length 1
    --length must be a whole number of at least 2, got 1
figures eld --length 1000000000000
    --length must be a whole number of at least 2, got 1000000000000, which is too large
figures kernels --channels 1000
    --channels must be a whole number from 1 to 12, got 1000
check las --options window=4
    window must be an odd number of at least 1, got 4
check las --options window
    --options must be NAME=VALUE, got window
check lass
    unknown mixer 'lass'; did you mean 'las' or 'lssl'?
data show listops --count 0
    --count must be a whole number of at least 1 or none, got 0
data show listops --first -1
    --first must be a whole number of at least 0, got -1
data prepare listops --sizes 1 1
    --sizes must be followed by 3 values
# what is empty
figures kernels --mixers
    mixers must name at least one mixer, got none
demo --runs=
    --runs must be a path, got ''
compare listops --mixers
    --mixers must be followed by at least one value
compare listops --seeds
    --seeds must be followed by at least one value
sweep atomic-cumsum --grid lr=1 --seeds
    --seeds must be followed by at least one value
sweep listops
    grid must name at least one field and its values, as in lr=1e-3,3e-4
sweep listops --grid
    grid must name at least one field and its values, as in lr=1e-3,3e-4
bench layers --mixers
    mixers must have at least one value, got none
bench attention --groups
    groups must have at least one value, got none
train listops --folder=
    --folder must be a path or none, got ''
train listops --runs=
    --runs must be a path, got ''
evaluate --split test --
    RUN must be given
# grids
sweep atomic-cumsum --jobs 0
    --jobs must be a whole number of at least 1, got 0
sweep atomic-cumsum --grid lr
    grid must have fields and their values, as in lr=1e-3,3e-4, got 'lr'
sweep atomic-cumsum --grid lr=
    grid must have fields and their values, as in lr=1e-3,3e-4, got 'lr='
sweep atomic-cumsum --grid =1
    grid must have fields and their values, as in lr=1e-3,3e-4, got '=1'
sweep atomic-cumsum --grid lr=1e-3,,2
    grid must have fields and their values, as in lr=1e-3,3e-4, got 'lr=1e-3
sweep atomic-cumsum --grid lrr=1
    grid names 'lrr', and there is no such field; did you mean 'lr'
sweep atomic-cumsum --grid lr=a
    lr must be a number above 0, got a
sweep atomic-cumsum --grid lr=1 lr=2
    grid names a field twice: lr=1 lr=2
sweep atomic-cumsum --grid lr=1 training.lr=2
    grid names a field twice: lr, training.lr
sweep atomic-cumsum --grid mixer=a,b
    unknown mixer 'a'
sweep atomic-cumsum --grid seed=0,1
    grid names the seed: give seeds instead
sweep atomic-cumsum --grid mixer.window=3 mixer=s4d
    grid names 'mixer.window', and there is no such field
sweep atomic-cumsum --grid betas=[0.9,2]
    betas must be 2 values, each a number of at least 0 and below 1, got 0.9 2
# recipes
train listops --recipe min
    recipe min of listops: unknown recipe; did you mean 'mini'? A file of your own must end
train listops --recipe publish
    recipe publish of listops: unknown recipe; did you mean 'published'? A file of your own must end
train listops --mixer las --recipe published
    recipe published of listops: mixer 'las' has no such recipe; choose from
compare listops --mixers s5 las --recipe published
    recipe published of listops: mixer 'las' has no such recipe; choose from
recipe show listops published
    recipe published of listops: mixer 'las' has no such recipe; choose from
train listops --groups ssm
    --groups must be a table of tables, or NAME.lr=… and NAME.weight_decay=… or none, got ssm
train listops --groups ssm.lr=1 ssm.lr=2
    --groups must be a table of tables, or NAME.lr=… and NAME.weight_decay=… or none, got ssm.lr=1 ssm.lr=2
train listops --groups ssm.rate=1
    group 'ssm' has no option 'rate'; choose from lr, weight_decay
train listops --warmup 1.5
    --warmup must be a number of at least 0 and below 1 or a whole number of at least 1, got 1.5
train listops --recipe my.toml
    recipe my.toml of listops: cannot read the file: No such file or directory
# what cannot go together
train text8 --mixer las-bidirectional
    a language task needs a causal mixer, and 'las-bidirectional' is not
train text8 --mixer.side centered
    a language task needs a causal mixer, and 'las' is not: choose side='past'
train text8 --norm batch
    norm must be layer, scale or rms for a language task, got batch, which mixes positions
train listops --mixer alibi --positions rotary
    positions must be none, sinusoidal or learned for mixer 'alibi'
figures kernels --mixers las
    mixer 'las' has no kernel to draw; those that have
# places
train files
    task 'files' needs the option 'path'
train files --task.path nowhere
    nowhere
train files --path nowhere
    nowhere
compare files --path nowhere
    nowhere
evaluate nowhere
    nowhere is not a run: it has no config.json
list runs
    there is no run in runs: 'longlens train' makes one there, or give --runs FOLDER
list runs --runs nowhere
    there is no run in nowhere
figures eld --out eld.txt
    out must end in .png, .pdf or .svg, got eld.txt
figures eld --out [/x].txt
    out must end in .png, .pdf or .svg, got [/x].txt
bench attention --out .
    out must be a file, and . is a folder
compare atomic-cumsum --out .
    out must be a file, and . is a folder
train atomic-cumsum --recipe smoke --steps 1 --runs /proc/nothing
    cannot write to /proc/nothing/atomic-cumsum/las/
train atomic-cumsum --recipe smoke --steps 1 --folder /proc/nothing
    cannot write to /proc/nothing (No such file
train atomic-cumsum --device cuda
    cuda
compare atomic-cumsum --address here
    address is that of a Ray cluster: choose the engine ray, or leave it out
# data
data prepare lisops
    unknown task 'lisops'; did you mean 'listops'?
data prepare listops --max-args 1
    --max-args must be a whole number of at least 2, got 1
data prepare listops --task.max-args 1
    --max-args must be a whole number of at least 2, got 1
data prepare listops --workers 0
    --workers must be a whole number of at least 1 or none, got 0
data prepare listops --from there
    leave out --from
data prepare smnist --from /nowhere
    there is no folder or archive /nowhere
data prepare files --path /nowhere
    there is no file or folder /nowhere
data show pathfinder --sizes 3 2 2
    --sizes must be 3 values, each an even number of at least 2, got 3 2 2
data verify nothing
    there is no prepared set of nothing
"""  # a command, and below it what its error says
CASES = re.findall(r"^(\S.*)\n {4}(.*)$", TABLE, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("line", "message"), CASES, ids=[line for line, _ in CASES])
def test_bad_input_is_one_sentence_and_exit_code_2(line, message, longlens, here):
    said = longlens(*line.split())
    assert said.code == 2, said
    assert said.err.startswith("longlens: ")
    assert message in said.err
    assert said.err.count("\n") == 1, "one line"
    assert FORMS.search(said.err), "one of the forms of a sentence"
    assert said.out == ""
    assert not list(here.iterdir()), "nothing half-written"


def test_in_a_shell_it_is_no_traceback(shell):
    said = shell("train", "listops", "--mixer", "lass")
    assert said == (2, "", "longlens: unknown mixer 'lass'; did you mean 'las' or 'lssl'?\n")


def test_sizes_that_do_not_fit_into_memory(longlens, here, tiny):
    said = longlens("train", "atomic-cumsum", *tiny, "--width", 2**20)  # of terabytes
    assert (said.code, said.err) == (2, "longlens: not enough memory for these sizes: try smaller ones\n")
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        "train atomic-cumsum --recipe smoke --steps 1 --runs afile",
        "train atomic-cumsum --recipe smoke --steps 1 --folder afile",
        "train atomic-cumsum --recipe smoke --steps 1 --folder afile/run",
        "compare atomic-cumsum --recipe smoke --steps 1 --out afile/x.json",
        "demo --out afile",
        "figures eld --out afile/eld.png",
        "list runs --runs afile",
        "evaluate afile",
        "train listops --recipe afile/my.toml",
    ],
)
def test_a_file_is_no_folder(line, longlens, here):
    (here / "afile").write_text("mine")
    said = longlens(*line.split())
    assert said.code == 2
    assert "afile" in said.err
    assert "Errno" not in said.err
    assert said.err.count("\n") == 1
    assert [path.name for path in here.iterdir()] == ["afile"]
    assert (here / "afile").read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nsteps = 5\nlerning_rate = 1e-3\n", "[training] has no option 'lerning_rate'; choose from seed,"),
        ("[training]\nsteps = 5\nbatch_sise = 8\n", "[training] has no option 'batch_sise'; did you mean 'batch_size'"),
        ("[model]\nwidth = 32\n", "one of epochs, steps and minutes must be given"),
        ("[modle]\nwidth = 32\n", "a recipe has no option 'modle'; did you mean 'model'"),
        ("model = 3\n", "model must be a table, got 3"),
        ("[mixers]\nlas = 3\n", "mixers must be a table of tables, got {'las': 3}"),
        ("[training]\nsteps = 0\n", "steps must be a whole number of at least 1 or none, got 0"),
        ("[training]\nsteps = 1\nlr = nan\n", "lr must be a number above 0, got nan"),
        ("[training\nsteps = 5\n", "not a TOML file: "),
        ("a = " + "[" * 100_000, "not a TOML file: "),
        ("a = " + "1" * 5_000, "not a TOML file: "),
        ("[task]\nlength = 8\nmax_length = 8\n[training]\nsteps = 1\n", "[task] names an option twice"),
    ],
)
def test_a_mistake_in_a_recipe(text, message, longlens, here):
    (here / "my.toml").write_text(text)
    said = longlens("train", "atomic-cumsum", "--recipe", "my.toml")
    assert said.code == 2
    assert message in said.err
    assert said.err.count("\n") == 1
    assert len(said.err) < 600


def test_a_recipe_that_is_no_text(longlens, here):
    (here / "my.toml").write_bytes(b"\xff\xfe\x00")
    said = longlens("train", "atomic-cumsum", "--recipe", "my.toml")
    assert said.code == 2
    assert "recipe my.toml of atomic-cumsum: the file is not text" in said.err


@pytest.mark.parametrize("name", ["las", "s4d", "lstm"])
def test_an_option_in_python_is_refused_by_the_same_sentence(name):
    import longlens

    with pytest.raises(ValueError, match=rf"mixer '{name}' has no option 'widht'"):
        longlens.create_mixer(name, 64, widht=3)
