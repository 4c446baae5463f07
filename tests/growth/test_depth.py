"""Lists of equal residual blocks get more blocks."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.optim.swa_utils import AveragedModel

import esper
from esper.contracts.errors import EsperWarning, InvalidInputError
from esper.growth.depth import find_blocks
from esper.growth.model import GrowingModel

HOWS = ("copy", "zero")
IDS = torch.arange(16).view(2, 8)


class Block(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A user's own; the list has another name and class by `kind`."""

    def __init__(self, count=2, kind=nn.Sequential, block=Block):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = kind(*[block() for _ in range(count)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def own():
    return Net(), torch.randn(5, 4), "blocks"


def hf(kind, config, example, name, **fields):
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, config)(**fields)
    return getattr(transformers, kind)(made), example, name


SIZES = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 16,
}


def gpt2():
    fields = {"n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 16}
    ids = {"input_ids": IDS}
    return hf("GPT2LMHeadModel", "GPT2Config", ids, "h", n_positions=16, **fields)


def llama():
    ids = {"input_ids": IDS}
    return hf("LlamaForCausalLM", "LlamaConfig", ids, "model.layers", **SIZES)


def qwen3():
    ids, more = {"input_ids": IDS}, {"num_key_value_heads": 1, "head_dim": 4}
    return hf("Qwen3ForCausalLM", "Qwen3Config", ids, "layers", **SIZES, **more)


def bert():
    ids = {"input_ids": IDS}
    return hf("BertForMaskedLM", "BertConfig", ids, "encoder.layer", **SIZES)


def vit():
    fields = {"image_size": 8, "patch_size": 4} | SIZES
    del fields["vocab_size"]
    example = {"pixel_values": torch.randn(2, 3, 8, 8)}
    return hf("ViTForImageClassification", "ViTConfig", example, "layers", **fields)


def t5():
    ids = {"input_ids": IDS, "decoder_input_ids": IDS}
    fields = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_heads": 2, "vocab_size": 16}
    fields |= {"num_layers": 2, "num_decoder_layers": 2}
    make = ("T5ForConditionalGeneration", "T5Config")
    return hf(*make, ids, "decoder.block", **fields)


def resnet():
    fields = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [2, 3]}
    example, name = {"pixel_values": torch.randn(2, 3, 32, 32)}, "stages.1.layers"
    make = ("ResNetForImageClassification", "ResNetConfig")
    return hf(*make, example, name, layer_type="basic", **fields)


MAKERS = (own, gpt2, llama, qwen3, bert, vit, t5, resnet)


def answer(model, example):
    with torch.no_grad():
        found = model(**example) if isinstance(example, dict) else model(example)
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("make", MAKERS)
def test_blocks_are_added(make, how, tmp_path):
    model, example, name = make()
    model.eval()
    growing = GrowingModel(model, [name], example)
    before, keys = answer(model, example), [*model.state_dict()]
    if make is bert and how == "zero":
        with pytest.raises(InvalidInputError, match="with weights of zero they change"):
            growing.deepen(name, by=2, how=how)
        assert [*model.state_dict()] == keys
        assert model.config.num_hidden_layers == 2
        return
    count = len(find_blocks(model, name, 0).order)
    receipt = growing.deepen(name, by=2, how=how)
    assert receipt.blueprint == f"deepen_{how}"
    assert (receipt.jump == 0.0) is (how == "zero")
    assert torch.equal(answer(model, example), before) is (how == "zero")
    assert len(find_blocks(model, name, 0).order) == count + 2
    growing.detach()
    if make is own:
        return
    # The config describes the network.
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(answer(again, example), answer(model, example))
    if make in (gpt2, llama, qwen3):
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        cached, plain = (
            model.generate(IDS, use_cache=use, **options) for use in (True, False)
        )
        assert torch.equal(cached, plain)
    if make is qwen3:
        assert len(model.config.layer_types) == 4


@pytest.mark.parametrize("make", [own, gpt2, vit, resnet])
def test_zero_blocks_learn(make):
    model, example, name = make()
    GrowingModel(model, [name], example).deepen(name, by=1, how="zero")
    new = find_blocks(model, name, 1).new[0]
    before = deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = model(**example) if isinstance(example, dict) else model(example)
    (out if isinstance(out, torch.Tensor) else out.logits).square().sum().backward()
    optimizer.step()
    after = model.state_dict()
    zero = [n for n in before if n.startswith(new) and not before[n].any()]
    assert any(not torch.equal(before[n], after[n]) for n in zero)


@pytest.mark.parametrize(
    ("count", "by", "order"),
    [
        (2, 1, (0, 1, 1)),
        (2, 2, (0, 1, 0, 1)),
        (4, 2, (0, 1, 1, 2, 3, 3)),
        (2, 3, (0, 1, 1, 0, 1)),
    ],
)
def test_copies_are_spread_or_stacked(count, by, order):
    model = Net(count)
    blocks = [*model.blocks]
    assert find_blocks(model, "blocks", by).order == order
    weights = [block.up.weight.clone() for block in blocks]
    GrowingModel(model, ["blocks"], torch.randn(2, 4)).deepen("blocks", by=by)
    for position, source in enumerate(order):
        block = model.blocks[position]
        assert torch.equal(block.up.weight, weights[source])
        assert (block is blocks[source]) is (order.index(source) == position)


def training(model, slots, **options):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = CosineAnnealingLR(optimizer, 100)
    example = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    options = {"controller": "never", "tick": 1, "mode": "min"} | options
    grower = esper.Grower(model, optimizer, slots, example=example, **options)

    def steps(count, average=None):
        for _ in range(count):
            loss = grower.loss(lambda: model(example).square().mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if average is not None:
                average.update_parameters(model)

    return grower, optimizer, schedule, steps


SLOTS = ["blocks.0.up->blocks.0.down", "blocks.1.up->blocks.1.down", "blocks"]


def test_new_parameters_join_the_groups_of_their_originals():
    model = Net(kind=listed)
    grower, optimizer, schedule, steps = training(model, SLOTS)
    steps(2)
    rates = [group["lr"] for group in optimizer.param_groups]
    states = {p: deepcopy(state) for p, state in optimizer.state.items()}
    grower.deepen("blocks", by=2)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    for p, state in states.items():
        for key, value in state.items():
            assert torch.equal(optimizer.state[p][key], value)
    new = [p for block in model.blocks[2:] for p in block.parameters()]
    assert not any(p in optimizer.state for p in new)
    ranks = [{p.ndim > 1 for p in g["params"]} for g in optimizer.param_groups]
    assert ranks == [{True}, {False}]
    before = [p.clone() for p in new]
    steps(1)
    assert not any(map(torch.equal, before, new))
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] < rates[0]
    assert grower.step(metric=1.0).receipts[0].op == "DEEPEN"


def listed(*blocks):
    return nn.ModuleList(blocks)


def test_only_depth_is_offered_by_hand():
    model = Net(kind=listed)
    grower, *_, steps = training(model, ["blocks"], controller="early")
    for _ in range(3):
        steps(1)
        decision = grower.step(metric=1.0)
        assert decision.why_not == "lists of blocks grow by deepen() only"
    grower.deepen("blocks")
    steps(1)
    assert grower.step(metric=1.0).parameters > decision.parameters
    assert "nothing has grown" not in grower.summary()


def test_new_blocks_widen_too_and_averages_follow():
    model = Net(kind=listed)
    slots = [*SLOTS[:2], "blocks"]
    grower, *_, steps = training(model, slots, seeds_per_slot=1)
    average = AveragedModel(model)
    grower.follow(average)
    steps(2, average)
    grower.deepen("blocks", by=1, how="zero")  # 0, 1, 1
    assert [len(average.module.blocks), len(model.blocks)] == [3, 3]
    assert not average.module.blocks[2].down.weight.any()
    last = "blocks.2.up->blocks.2.down#0"
    assert grower.model.slots == (
        "blocks.0.up->blocks.0.down#0",
        "blocks.1.up->blocks.1.down#0",
        last,
    )
    grower.plant(last, "widen_8", tempo="AT_ONCE")
    with pytest.raises(InvalidInputError, match="keep or prune the seeds"):
        grower.deepen("blocks")
    steps(2, average)
    grower.finish()
    steps(1, average)
    for net in (model, average.module):
        assert [block.up.out_features for block in net.blocks] == [12, 12, 20]
        assert net(torch.randn(2, 4)).isfinite().all()


@pytest.mark.parametrize("how", HOWS)
def test_training_resumes_in_the_small_host(how):
    def fresh():
        torch.manual_seed(3)
        model = Net(kind=listed)
        return model, *training(model, SLOTS, controller="periodic", decisions=9)

    model, grower, _, schedule, steps = fresh()
    for n in range(5):
        steps(2)
        grower.step(metric=1.0)
        if n == 1:
            grower.model.finish()
            grower.deepen("blocks", by=1, how=how)
            grower.deepen("blocks", by=1, how=how)
    saved = deepcopy((grower.state_dict(), schedule.state_dict()))
    other, resumed, _, again, more = fresh()
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert resumed.model.depths == grower.model.depths
    for grow, run in ((grower, steps), (resumed, more)):
        for _ in range(3):
            run(2)
            grow.step(metric=1.0)
    assert [*model.state_dict()] == [*other.state_dict()]
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert grower.history[5:] == resumed.history[5:]
    _, small, *_ = fresh()
    with pytest.raises(InvalidInputError, match="has other blocks than this one"):
        resumed.load_state_dict(small.state_dict())
    assert len(other.blocks) == 4


class ByPosition(Net):
    def forward(self, x):
        h = self.first(x)
        return self.head(self.blocks[1](self.blocks[0](h)))


class Parallel(Net):
    def forward(self, x):
        h = self.first(x)
        return self.head(sum(block(h) for block in self.blocks))


class Fixed(Net):
    def forward(self, x):
        h, scales = self.first(x), [1.0, 0.5]
        for n, block in enumerate(self.blocks):
            h = scales[n] * block(h)
        return self.head(h)


class Shrinking(Net):
    def __init__(self):
        super().__init__(2, listed)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 4))])
        self.head = nn.Linear(4, 3)


class Plain(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)


def shared():
    net = Net()
    net.blocks[1] = net.blocks[0]
    return net


def tied():
    net = Net()
    net.blocks[1].up.weight = net.blocks[0].up.weight
    return net


def mixed():
    net = Net()
    net.blocks[1] = nn.Sequential(nn.Linear(6, 6))
    return net


REFUSED = {
    "is not residual, it reads .5, 6. and returns .5, 4.": Shrinking,
    "'blocks.1' is not residual": lambda: Net(block=Plain),
    "reads the list by position and does not call 'blocks.2'": ByPosition,
    "its blocks read the same tensor": Parallel,
    "the host then fails, IndexError": Fixed,
    "'blocks.0' is shared with 'blocks.1'": shared,
    "blocks.0.up.weight is tied to blocks.1.up.weight": tied,
    "its blocks are of different classes, Block, Sequential": mixed,
    "it is empty": lambda: Net(0),
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused_changes_nothing(line, how):
    model, x = REFUSED[line](), torch.randn(5, 4)
    growing = GrowingModel(model, ["head->head"], x)
    held = deepcopy(model.state_dict())
    tree, before = repr(model), answer(model, x)
    with pytest.raises(InvalidInputError, match=line) as error:
        growing.deepen("blocks", by=1, how=how)
    assert "blocks" in str(error.value)
    assert "\n" not in str(error.value)
    assert repr(model) == tree
    assert all(map(torch.equal, held.values(), model.state_dict().values()))
    assert torch.equal(answer(model, x), before)
    assert growing.depths == []


def test_a_head_of_zeros_does_not_hide_that_blocks_are_residual():
    model = Net()
    nn.init.zeros_(model.head.weight)
    growing = GrowingModel(model, ["blocks"], torch.randn(5, 4))
    growing.deepen("blocks", by=1)
    assert len(model.blocks) == 3


def test_marks_of_parameters_are_copied_and_hooks_on_their_gradients_are_refused():
    model = Net()
    model.blocks[1].up.weight.mark = "matrix"
    growing = GrowingModel(model, ["blocks"], torch.randn(5, 4))
    growing.deepen("blocks", by=2)
    assert model.blocks[3].up.weight.mark == "matrix"
    handle = model.blocks[3].up.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(InvalidInputError, match=r"'up.weight' of one has a hook"):
        growing.deepen("blocks", by=4)
    handle.remove()
    growing.deepen("blocks", by=4)
    assert len(model.blocks) == 8


def test_a_compiled_or_wrapped_host_is_refused():
    model = Net()
    growing = GrowingModel(model, ["head->head"], torch.randn(5, 4))
    growing.ranks.wrapper = model
    with pytest.raises(InvalidInputError, match="DistributedDataParallel"):
        growing.deepen("blocks")
    growing.ranks.wrapper = None
    model.blocks[0].compile(backend="eager")
    with pytest.raises(InvalidInputError, match="is compiled at"):
        growing.deepen("blocks")


def test_a_schedule_that_holds_parameters_is_refused():
    model = Net(kind=listed)
    grower, optimizer, *_ = training(model, ["blocks"])
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    schedule.held = [*model.parameters()]
    with pytest.raises(InvalidInputError, match="LambdaLR holds parameters"):
        grower.deepen("blocks")
    del schedule.held
    grower.deepen("blocks")


def test_an_interrupted_change_is_undone(monkeypatch):
    model = Net(kind=listed)
    grower, optimizer, _, steps = training(model, SLOTS)
    average = AveragedModel(model)
    grower.follow(average)
    steps(1)
    tree, own = repr(model), [len(g["params"]) for g in optimizer.param_groups]
    twin, slots = repr(average), grower.model.slots

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(grower._surgery, "take_over", fail)
    with pytest.raises(KeyboardInterrupt):
        grower.deepen("blocks", by=2)
    monkeypatch.undo()
    assert (repr(model), repr(average)) == (tree, twin)
    assert [len(g["params"]) for g in optimizer.param_groups] == own
    assert grower.model.slots == slots
    steps(1)
    grower.step(metric=1.0)
    grower.deepen("blocks", by=2)
    steps(1)


def test_copies_are_numbered_and_share_what_their_originals_share():
    settings = object()

    class Numbered(Block):
        def __init__(self):
            super().__init__()
            self.layer_idx = self.groups = 0
            self.settings = settings

    model = Net(kind=listed, block=Numbered)
    for n, block in enumerate(model.blocks):
        block.layer_idx = block.groups = n
    GrowingModel(model, ["blocks"], torch.randn(2, 4)).deepen("blocks", by=1)
    assert [block.layer_idx for block in model.blocks] == [0, 1, 2]
    assert [block.groups for block in model.blocks] == [0, 1, 1]
    assert all(block.settings is settings for block in model.blocks)


def test_blocks_that_have_grown_to_other_widths_get_copies_and_resume():
    def fresh():
        torch.manual_seed(0)
        model = Net(3, listed)
        return model, *training(model, ["*up->*", "blocks"], controller="never")

    def run(grower, steps, count):
        for _ in range(count):
            steps(2)
            grower.step(metric=1.0)

    model, grower, _, schedule, steps = fresh()
    for n in (0, 1):
        grower.plant(f"blocks.{n}.up->blocks.{n}.down#0", "widen_x2", tempo="AT_ONCE")
        run(grower, steps, n + 1)
        grower.finish()
    grower.plant("blocks.0.up->blocks.0.down#0", "widen_x2", tempo="AT_ONCE")
    grower.finish()
    grower.deepen("blocks", by=3, how="zero")
    assert [block.up.out_features for block in model.blocks] == [48, 24, 12] * 2
    saved = deepcopy((grower.state_dict(), schedule.state_dict()))
    other, resumed, _, again, more = fresh()
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    run(grower, steps, 2)
    run(resumed, more, 2)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_blocks_are_added_under_autocast_but_not_in_inference_mode():
    model, x = Net(), torch.randn(5, 4)
    growing = GrowingModel(model, ["blocks"], x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert growing.deepen("blocks", how="zero").jump == 0.0
        assert len(esper.enlarge(Net(), 1.0, 2, example=x).blocks) == 4
    for call in (
        lambda: growing.deepen("blocks", how="zero"),
        lambda: esper.enlarge(Net(), 2.0, 2, example=x),
    ):
        with torch.inference_mode(), pytest.raises(InvalidInputError) as error:
            call()
        assert "inference mode; leave it first" in str(error.value)
    assert len(model.blocks) == 3


def test_a_name_that_is_no_string_is_refused():
    growing = GrowingModel(Net(), ["blocks"], torch.randn(5, 4))
    for name in (None, 3, growing.host.blocks):
        with pytest.raises(InvalidInputError, match="expected the name of a list"):
            growing.deepen(name)


def swin():
    fields = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "window_size": 4}
    fields |= {"depths": [2, 2], "num_heads": [2, 2]}
    kind, config = "SwinForImageClassification", "SwinConfig"
    return hf(kind, config, {"pixel_values": torch.randn(2, 3, 16, 16)}, "", **fields)


def test_a_config_that_would_rebuild_other_blocks_is_refused():
    model, example, _ = swin()
    growing = GrowingModel(model, ["classifier"], example)
    for name, by, line in (
        ("swin.encoder.layers", 1, "no field for their number, so save_pretrained"),
        ("layers.1.blocks", 1, "SwinConfig gives them another shift_size"),
    ):
        with pytest.raises(InvalidInputError, match=line):
            growing.deepen(name, by=by)
    assert model.config.depths == [2, 2]
    growing.deepen("layers.1.blocks", by=2)
    assert model.config.depths == [2, 4]
    with pytest.warns(EsperWarning, match="cannot get") as warned:
        larger = esper.enlarge(swin()[0], 1.0, 2, example=example, how="copy")
    assert larger.config.depths == [2, 4]
    assert any("layers.0.blocks" in str(one.message) for one in warned)


def test_no_other_field_of_a_config_follows_the_number_of_blocks():
    fields = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 3)}
    fields |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    x = {"input_values": torch.randn(2, 400)}
    fields |= {"num_feat_extract_layers": 2, **SIZES}
    model, *_ = hf("Wav2Vec2ForCTC", "Wav2Vec2Config", x, "", **fields)
    larger = esper.enlarge(model.eval(), 1.0, 2, example=x, how="copy")
    assert larger.config.num_hidden_layers == 4
    assert larger.config.num_feat_extract_layers == 2


@pytest.mark.parametrize("make", [own, gpt2, resnet])
def test_a_trained_network_is_enlarged(make, tmp_path):
    model, example, name = make()
    model.eval()
    before, tree = answer(model, example), repr(model)
    larger = esper.enlarge(model, width=1.5, depth=2, example=example)
    torch.testing.assert_close(answer(larger, example), before)
    assert repr(model) == tree
    assert type(larger) is type(model)
    counts = [len(find_blocks(net, name, 0).order) for net in (model, larger)]
    assert counts[1] == 2 * counts[0]
    sizes = [sum(p.numel() for p in net.parameters()) for net in (model, larger)]
    assert sizes[1] > 2 * sizes[0] or make is gpt2
    if make is gpt2:
        assert larger.config.n_inner == 48
        larger.save_pretrained(tmp_path)
        again = type(larger).from_pretrained(tmp_path).eval()
        assert torch.equal(answer(again, example), answer(larger, example))
    copied = esper.enlarge(model, 1.0, 3, example=example, how="copy")
    assert not torch.equal(answer(copied, example), before)


def test_enlarge_refuses():
    x = torch.randn(2, 4)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(InvalidInputError, match="no list of equal residual blocks"):
        esper.enlarge(plain, depth=2, example=x)
    with pytest.raises(InvalidInputError, match="depth must be a whole number"):
        esper.enlarge(plain, depth=1.5, example=x)
    with pytest.raises(InvalidInputError, match="how must be one of"):
        esper.enlarge(plain, how="Zero", example=x)
    with pytest.raises(InvalidInputError, match="width must"):
        esper.enlarge(plain, width=0.5, example=x)
    model = Net()
    GrowingModel(model, ["head->head"], x)
    with pytest.raises(InvalidInputError, match="has a Grower"):
        esper.enlarge(model, example=x)
