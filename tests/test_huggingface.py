"""Models of Hugging Face grow, in a Trainer too, and are saved as such models."""

import copy
import logging
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import esper
from esper.contracts.errors import EsperWarning, InvalidInputError
from esper.contracts.stages import Stage
from esper.growth.analysis.tracing import eval_outputs
from esper.growth.blueprints.registry import find
from esper.growth.model import GrowingModel
from tests.growth.hosts import Vectors, everything, make_batch, shake

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

from transformers import (  # noqa: E402
    ConvNextConfig,
    ConvNextForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from esper.huggingface import (  # noqa: E402
    STATE_FILE,
    GrowCallback,
    _wrap_forward,
    merge_into_model,
)

WORDS = 20
IDS = torch.randint(0, WORDS, (2, 6), generator=torch.Generator().manual_seed(0))
PLAIN = {"use_cache": False, "bos_token_id": None, "eos_token_id": None}


def gpt2(layers=1):
    config = GPT2Config(
        vocab_size=WORDS, n_embd=8, n_layer=layers, n_head=2, n_positions=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **PLAIN,
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def llama():
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, **PLAIN,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def t5():
    config = T5Config(
        vocab_size=WORDS, d_model=8, d_ff=12, d_kv=4, num_layers=1, num_heads=2,
        feed_forward_proj="gated-gelu", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return T5ForConditionalGeneration(config)


def convnext():
    torch.manual_seed(0)
    config = ConvNextConfig(
        hidden_sizes=[4], depths=[1], num_stages=1, patch_size=2, num_labels=3,
        layer_scale_init_value=1.0,
    )  # fmt: skip
    return ConvNextForImageClassification(config)


HOSTS = {
    "gpt2": (gpt2, {"input_ids": IDS}, ["transformer.h.0.mlp.c_fc->*"]),
    "llama": (llama, {"input_ids": IDS}, ["*.mlp"]),
    "t5": (t5, {"input_ids": IDS, "decoder_input_ids": IDS}, ["*.wi_0->*.wo"]),
    "convnext": (
        convnext,
        {"pixel_values": torch.randn(2, 3, 8, 8)},
        ["*.pwconv1->*.pwconv2"],
    ),
}
SIZES = {
    "gpt2": ("n_inner", 48), "llama": ("intermediate_size", 18), "t5": ("d_ff", 18)
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTS)
def test_their_mlps_widen_without_a_trace_and_are_saved_as_their_own(kind, tmp_path):
    make, example, slots = HOSTS[kind]
    host = make()
    optimizer = torch.optim.SGD(host.parameters(), 0.1)
    grower = esper.Grower(
        host, optimizer, slots, example=example, controller="never", merge_only=True
    )
    model = grower.model
    before = model.example_outputs()
    places = len(model.seeds.places)
    for slot in model.decided[model.decided < places].tolist():
        grower.plant(model.slots[slot], "widen_x1.5", tempo="AT_ONCE")
    assert len(model.seeds) == places
    assert all(map(torch.equal, before, model.example_outputs()))
    shake(model)
    after = model.example_outputs()
    assert not torch.allclose(before[0], after[0], atol=1e-3)
    rebuilt = esper.rebuild(make(), host.state_dict())
    assert torch.equal(eval_outputs(rebuilt, example)[0], after[0])
    if kind not in SIZES:
        with pytest.raises(InvalidInputError, match="ConvNextConfig has no field for"):
            merge_into_model(grower)
        assert type(grower.export()) is type(host)
        return
    merge_into_model(grower)
    host.save_pretrained(tmp_path)
    loaded = type(host).from_pretrained(tmp_path)
    key, size = SIZES[kind]
    assert getattr(loaded.config, key) == size
    logits = eval_outputs(loaded, example)[0]
    assert torch.allclose(logits, after[0], rtol=0, atol=1e-5 * after[0].abs().max())


def swin():
    torch.manual_seed(0)
    config = SwinConfig(
        image_size=8, patch_size=2, embed_dim=4, depths=[1, 1], num_heads=[1, 1],
        window_size=2, num_labels=3,
    )  # fmt: skip
    return SwinForImageClassification(config)


def whisper():
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=WORDS, d_model=8, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8,
        decoder_ffn_dim=12, num_mel_bins=4, max_source_positions=8,
        max_target_positions=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def dinov2():
    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=8, num_attention_heads=2, num_hidden_layers=2, image_size=8,
        patch_size=4, mlp_ratio=2, num_labels=3,
    )  # fmt: skip
    return Dinov2ForImageClassification(config)


TIED = {
    "dinov2": (dinov2, {"pixel_values": torch.randn(2, 3, 8, 8)}, {"mlp_ratio": 4}),
    "gpt2": (lambda: gpt2(2), {"input_ids": IDS}, {"n_inner": 64}),
    "swin": (swin, {"pixel_values": torch.randn(2, 3, 8, 8)}, {"mlp_ratio": 8.0}),
    "whisper": (
        whisper,
        {"input_features": torch.randn(2, 4, 16), "decoder_input_ids": IDS},
        {"encoder_ffn_dim": 16, "decoder_ffn_dim": 24},
    ),
}


@pytest.mark.parametrize("kind", TIED)
def test_layers_of_one_config_field_grow_together_and_the_config_follows(
    kind, tmp_path
):
    make, example, fields = TIED[kind]
    host, places = make(), 2 * len(fields)
    optimizer = torch.optim.SGD(host.parameters(), 0.1)
    options = {"controller": "never", "seeds_per_slot": 2, "min_age": 0}
    grower = esper.Grower(host, optimizer, example=example, **options)
    model = grower.model
    assert len(model.seeds.places) == places
    assert model.spec.slots.max_slots == 2 * len(fields)
    leads = [model.slots[slot] for slot in model.decided[: len(fields)].tolist()]
    for lead in leads:
        living = len(model.seeds)
        grower.plant(lead, "widen_x1.5")
        assert len(model.seeds) == living + 2
        grower.prune(lead)
        assert len(model.seeds) == living
        grower.plant(lead, "widen_x2", tempo="AT_ONCE")
    assert len(model.seeds) == places
    shake(model)
    state = copy.deepcopy(grower.state_dict())
    again = make()
    resumed = esper.Grower(
        again, torch.optim.SGD(again.parameters(), 0.1), example=example, **options
    )
    resumed.load_state_dict(state)
    for one in (grower, resumed):
        before = one.model.example_outputs()
        for lead in leads:
            one.keep(lead)
        assert len(one.model.seeds) == 0
        after = one.model.example_outputs()
        assert torch.allclose(before[0], after[0], rtol=1e-4, atol=1e-6)
        folder = one.model.host
        assert {key: getattr(folder.config, key) for key in fields} == fields
        folder.save_pretrained(tmp_path)
        loaded = type(folder).from_pretrained(tmp_path)
        assert torch.equal(eval_outputs(loaded, example)[0], after[0])
    rebuilt = esper.rebuild(make(), host.state_dict())
    assert {key: getattr(rebuilt.config, key) for key in fields} == fields


def test_the_config_of_a_part_follows_too(tmp_path):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = gpt2(2).transformer
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, ids):
            state = self.body(ids).last_hidden_state[:, -1]
            return self.down(torch.relu(self.up(state)))

    host = Classifier()
    optimizer = torch.optim.SGD(host.parameters(), 0.1)
    options = {"controller": "never", "seeds_per_slot": 1, "min_age": 0}
    grower = esper.Grower(host, optimizer, example=IDS, **options)
    slot, _, head = grower.model.slots
    assert grower.model.tied == ((0, 1), (0, 1), (2,))
    assert head == "up->down#0"
    for one in (slot, head):
        grower.plant(one, "widen_x2", tempo="AT_ONCE")
    shake(grower.model)
    for one in (slot, head):
        grower.keep(one)
    host.body.save_pretrained(tmp_path)
    loaded = GPT2Model.from_pretrained(tmp_path)
    expected = eval_outputs(host.body, IDS)[0]
    assert torch.equal(eval_outputs(loaded, IDS)[0], expected)


def test_a_slot_in_a_part_of_the_layers_of_one_field_is_warned_of():
    host = gpt2(2)
    optimizer = torch.optim.SGD(host.parameters(), 0.1)
    with pytest.warns(EsperWarning, match="n_inner of the config also sizes") as seen:
        esper.Grower(host, optimizer, ["*h.1.mlp"], example={"input_ids": IDS})
    assert "'transformer.h.0.mlp.c_fc'" in str(seen[0].message)
    with warnings.catch_warnings(action="error"):
        GrowingModel(gpt2(2), "auto", {"input_ids": IDS})
        GrowingModel(gpt2(2), ["*h.1.mlp"], {"input_ids": IDS}, tie_widths=False)


def test_units_that_no_ratio_describes_are_refused_and_layers_can_grow_apart():
    example, options = TIED["swin"][1], {"controller": "never", "seeds_per_slot": 1}
    host = swin()
    optimizer = torch.optim.SGD(host.parameters(), 0.1)
    grower = esper.Grower(host, optimizer, example=example, **options)
    slot, other = grower.model.slots
    assert grower.model.price(0, find("widen_8")) is None
    with pytest.raises(InvalidInputError, match="to layers of 16, 32 units that one"):
        grower.plant(slot, "widen_8")
    assert len(grower.model.seeds) == 0
    with pytest.warns(EsperWarning, match="taken over"):
        grower = esper.Grower(
            host, optimizer, example=example, tie_widths=False, **options
        )
    grower.plant(slot, "widen_8", tempo="AT_ONCE")
    assert grower.model.stage(other) is Stage.DORMANT
    heads = esper.suggest_slots(host, example, tie_widths=False)
    assert len(heads) >= len(esper.suggest_slots(host, example)) == 2
    host = dinov2()
    optimizer = torch.optim.SGD(host.parameters(), 0.1)
    grower = esper.Grower(host, optimizer, example=TIED["dinov2"][1], **options)
    grower.plant(grower.model.slots[0], "widen_x1.25", tempo="AT_ONCE")
    with pytest.raises(InvalidInputError, match=r"has no mlp_ratio of 2\.5, so the"):
        merge_into_model(grower)
    assert len(grower.model.seeds) == 2


class Sentences(Dataset):
    """Numbers that go up by one, from somewhere on."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        ids = (torch.arange(6) + 7 * index) % WORDS
        return {"input_ids": ids, "labels": ids}


class Labelled(Sentences):
    """One class per sentence."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "labels": torch.tensor(index % 2)}


class Pictures(Sentences):
    """One class per brightness."""

    def __getitem__(self, index):
        return {
            "pixel_values": torch.full((3, 4, 4), index % 2 - 0.5),
            "labels": torch.tensor(index % 2),
        }


def train(folder, callback, model, resume=None, data=Sentences, **options):
    usual = {
        "num_train_epochs": 4, "eval_strategy": "epoch", "save_strategy": "epoch",
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2, "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "logging_strategy": "no", "save_total_limit": None,
    }  # fmt: skip
    args = TrainingArguments(str(folder), **{**usual, **options})
    trainer = Trainer(
        model,
        args,
        train_dataset=data(64),
        eval_dataset=data(16),
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def growing(**options):
    usual = {"controller": "early", "tick": 2, "seeds_per_slot": 2}
    return GrowCallback(["*.mlp"], **{**usual, **options})


def test_a_trainer_grows_its_model_and_saves_an_ordinary_one(tmp_path):
    callback = growing()
    trainer = train(tmp_path, callback, gpt2())
    model, history = trainer.model, callback.grower.history
    assert len(history) == 4
    assert any("plant" in decision.action for decision in history)
    assert callback.grower._compute > 0
    assert "forward" not in vars(model)
    assert not [name for name in model.state_dict() if "esper" in name]
    assert model.config.n_inner == model.transformer.h[0].mlp.c_fc.nf > 32
    trainer.save_model(tmp_path / "grown")
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "grown").eval()
    assert torch.equal(loaded(IDS).logits, model.eval()(IDS).logits)
    assert history[-1].metric < history[0].metric
    trainer.evaluate()  # after training, no decision is taken
    assert len(history) == 4


class Endless(IterableDataset):
    """The same without a length."""

    def __init__(self, rows):
        self.inner = Sentences(rows)

    def __iter__(self):
        return (self.inner[index] for index in range(self.inner.rows))


@pytest.mark.parametrize("best", ["first", "last"])
def test_the_best_model_is_loaded_at_the_end_from_before_or_after_growth(
    best, tmp_path
):
    class Planting(GrowCallback):
        def on_step_begin(self, args, state, control, **more):
            if state.global_step == 6:
                slot = next(iter(self.grower.model.slots))
                self.grower.plant(slot, "widen_8", tempo="AT_ONCE")

    callback = Planting(["*.mlp"], controller="never", merge=False)
    trainer = train(
        tmp_path,
        callback,
        gpt2(),
        data=Endless,
        max_steps=16,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=4,
        save_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=best == "first",
    )
    grew = [name for name in trainer.model.state_dict() if "esper" in name]
    assert bool(grew) == (best == "last")
    assert (
        callback.grower.history[-1].parameters > callback.grower.history[0].parameters
    )


@pytest.mark.parametrize("kept", ["in place", "moved"])
def test_a_checkpoint_holds_what_has_grown_and_is_resumed_to_the_bit(kept, tmp_path):
    whole, part = growing(merge=False), growing(merge=False)
    first = train(tmp_path / "whole", whole, gpt2(2))
    saved = tmp_path / "whole" / "checkpoint-8"
    output = tmp_path / "whole"
    if kept == "moved":
        output = tmp_path / "other"
        with pytest.raises(
            InvalidInputError, match=r"Pass its folder: GrowCallback\(check"
        ):
            train(output, growing(), gpt2(2), resume=str(saved))
        part.checkpoint = saved
    second = train(output, part, gpt2(2), resume=str(saved))
    assert whole.grower.model.parameters_added > 0
    assert (
        first.model.transformer.h[0].mlp.c_fc.nf > gpt2(2).transformer.h[0].mlp.c_fc.nf
    )
    assert everything(second.model, second.optimizer.optimizer) == everything(
        first.model, first.optimizer.optimizer
    )
    assert [d.action for d in part.grower.history] == [
        d.action for d in whole.grower.history
    ]
    # The weights of a checkpoint are a network of their own.
    last = tmp_path / "whole" / "checkpoint-16" / "model.safetensors"
    loaded = esper.load(last, gpt2(2)).eval()
    assert torch.equal(loaded(IDS).logits, first.model.eval()(IDS).logits)


def vit():
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        image_size=4, patch_size=2, num_labels=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return ViTForImageClassification(config)


@pytest.mark.parametrize(
    ("state", "which"),
    [({"format": 8, "step": 4}, "Esper 0.1.0"), ([], "an unknown version")],
)
def test_a_state_of_another_version_is_refused(state, which, tmp_path):
    train(tmp_path, growing(), gpt2(), num_train_epochs=1)
    saved = tmp_path / "checkpoint-4"
    torch.save(state, saved / STATE_FILE)
    line = f"checkpoint-4/esper.pt was written by {which}"
    with pytest.raises(InvalidInputError, match=line):
        train(tmp_path, growing(), gpt2(), resume=str(saved))


def test_a_model_that_is_saved_under_former_names_is_resumed_too(tmp_path):
    whole, part = (growing(merge=False) for _ in range(2))
    first = train(tmp_path, whole, vit(), data=Pictures)
    saved = tmp_path / "checkpoint-8"
    second = train(tmp_path, part, vit(), resume=str(saved), data=Pictures)
    assert whole.grower.model.parameters_added > 0
    assert everything(second.model, second.optimizer.optimizer) == everything(
        first.model, first.optimizer.optimizer
    )
    last = esper.load(tmp_path / "checkpoint-16" / "model.safetensors", vit())
    assert everything(last) == everything(first.model)


def test_layers_of_different_sizes_are_kept_and_one_line_says_so(tmp_path, caplog):
    class Uneven(GrowCallback):
        def on_epoch_begin(self, args, state, control, **_):
            if state.epoch == 1:
                slot = self.grower.model.slots[0]
                self.grower.plant(slot, "widen_8", tempo="AT_ONCE")

    callback = Uneven(["*.mlp"], controller="never", tie_widths=False)
    logging.getLogger("transformers").propagate = True
    trainer = train(tmp_path, callback, llama(), save_strategy="no")
    assert "sizes (12, 20) and LlamaConfig has one intermediate_size" in caplog.text
    assert "esper.load(path, model)" in caplog.text
    assert len(trainer.model.esper_seeds) == 1
    esper.save(trainer.model, tmp_path / "net.safetensors")
    loaded = esper.load(tmp_path / "net.safetensors", llama()).eval()
    assert torch.equal(loaded(IDS).logits, trainer.model.eval()(IDS).logits)


@pytest.mark.parametrize("merge", [True, False])
def test_a_model_that_keeps_its_seeds_is_not_saved_without_them(merge, tmp_path):
    config = RobertaConfig(
        vocab_size=WORDS, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=10, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    # Its head grows too, and no field of the config holds the width of that.
    model = RobertaForSequenceClassification(config)
    options = {"controller": "early", "tick": 2, "seeds_per_slot": 1, "merge": merge}
    callback = GrowCallback(tie_widths=False, **options)
    trainer = train(tmp_path, callback, model, data=Labelled)
    for save in (model.save_pretrained, trainer.save_model):
        with pytest.raises(
            InvalidInputError, match=r"Save it with esper.save\(model, path\)"
        ):
            save(tmp_path / "grown")
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with pytest.raises(
        InvalidInputError, match="from_pretrained would not load what grew"
    ):
        copied.save_pretrained(tmp_path / "grown")
    callback.grower.detach()
    esper.save(model, tmp_path / "grown.safetensors")
    again = GrowCallback(tie_widths=False, **options)
    train(tmp_path / "again", again, copied, data=Labelled, num_train_epochs=1)


def test_a_training_seed_leaves_the_model_as_it_would_be_without(tmp_path):
    ends = []
    for plant in (False, True):

        class Planting(GrowCallback):
            def on_epoch_begin(self, args, state, control, plant=plant, **_):
                if plant and state.epoch == 1:
                    slot = self.grower.model.slots[0]
                    self.grower.plant(slot, "widen_8", tempo="SLOW")

        callback = Planting(["*.mlp"], controller="never", tick=100)
        plain = {"save_strategy": "no", "num_train_epochs": 3, "max_grad_norm": 0.0}
        trainer = train(tmp_path / str(plant), callback, gpt2(), **plain)
        ends.append(everything(trainer.model, seeds=False))
    reasons = [event.reason for event in callback.grower.model.events]
    assert reasons == ["growth is finished"]
    assert ends[0] == ends[1]


def test_what_the_callback_cannot_do_is_refused_in_one_line(tmp_path):
    plain = {"save_strategy": "no"}
    with pytest.raises(InvalidInputError, match="decides after evaluations"):
        train(tmp_path, growing(), gpt2(), eval_strategy="no", **plain)
    with pytest.raises(InvalidInputError, match="a compiled model does not grow"):
        train(tmp_path, growing(), gpt2(), torch_compile=True, **plain)
    with pytest.raises(InvalidInputError, match="'eval_f1' was not measured"):
        train(tmp_path, growing(monitor="eval_f1"), gpt2(), **plain)
    grown = gpt2()
    slot = "transformer.h.0.mlp.c_fc->transformer.h.0.mlp.c_proj"
    GrowingModel(grown, [slot], IDS).plant(f"{slot}#0", "widen_8", tempo="AT_ONCE")
    callback, model = growing(), gpt2()
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), eval_strategy="epoch", report_to=[]),
        train_dataset=Sentences(8),
        eval_dataset=Sentences(8),
        callbacks=[callback],
    )
    model.load_state_dict(grown.state_dict())
    with pytest.raises(InvalidInputError, match=r"Give the Trainer esper\.rebuild"):
        trainer.train()
    with pytest.raises(RuntimeError, match=r"esper\.rebuild\(host, state_dict\)"):
        model.load_state_dict(grown.state_dict())
    done = growing(controller="never")
    trainer = train(tmp_path, done, gpt2(), num_train_epochs=1, **plain)
    assert not hasattr(trainer.model, "esper_seeds")  # nothing has grown
    with pytest.raises(InvalidInputError, match="has grown a network already"):
        trainer.train()


def test_a_plain_module_grows_too(tmp_path):
    class Plain(nn.Module):
        """No config, and a tuple for an answer."""

        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(WORDS, 8)
            self.mlp = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, WORDS))

        def forward(self, input_ids, labels=None):
            logits = self.mlp(self.words(input_ids))
            if labels is None:
                return (logits,)
            flat = logits.flatten(0, 1), labels.flatten()
            return nn.functional.cross_entropy(*flat), logits

    torch.manual_seed(0)
    callback = GrowCallback(["mlp*"], controller="early", tick=2)
    model = train(tmp_path, callback, Plain(), save_strategy="no").model
    assert not hasattr(model, "esper_seeds")
    assert model.mlp[0].out_features == model.mlp[2].in_features > 4
    assert callback.grower.history[-1].metric < callback.grower.history[0].metric


def test_an_answer_without_a_loss_is_the_hosts_own():
    class Answering(Vectors):
        def forward(self, x):
            return {"logits": super().forward(x)}

    host, x = Answering(), make_batch("vector", 16)[0]
    optimizer = torch.optim.AdamW(host.parameters())
    grower = esper.Grower(
        host, optimizer, ["first->second"], example=x, controller="never"
    )
    grower.plant("first->second#0", "widen_8", tempo="SLOW")
    shake(grower.model)
    torch.manual_seed(1)
    own = host(x)["logits"]
    unwrap = _wrap_forward(host, grower)
    torch.manual_seed(1)
    answered = host(x)["logits"]
    unwrap()
    assert torch.equal(answered, own)
    answered.sum().backward()
    assert host.first.weight.grad is not None
