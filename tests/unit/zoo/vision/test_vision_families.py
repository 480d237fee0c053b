"""A model that sees, packed, beside Hugging Face's own with eager attention; and its engine beside its trainer."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText
from vision_fakes import picture

from reroll.config.parts import LoraConfig, OptimConfig
from reroll.config.strategy import TorchStrategyConfig
from reroll.errors import DataError, ModelError
from reroll.infer.embedded import engine as embedded
from reroll.infer.embedded.engine import EmbeddedEngine
from reroll.models.attention import logits
from reroll.models.load import load_model, load_tokenizer, save_model
from reroll.tokens.batch import pack
from reroll.tokens.pictures import FIRST_ID
from reroll.tokens.renderer import Renderer
from reroll.tokens.samples import sft_sample
from reroll.training.loss import SFT_LOSS
from reroll.training.predict import token_states
from reroll.training.torch_strategy import TorchStrategy
from reroll.types import Request, SamplingParams
from reroll_zoo.tiny_models import make_tiny
from reroll_zoo.vision.families import family_of
from reroll_zoo.vision.parts import message
from reroll_zoo.vision.reader import reader_of
from reroll_zoo.vision.store import runs_in

TOLERANCE = 2e-5


def louder(model):
    """Weights large enough for positions and pictures to show in the log-probs."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def ours_of(folder, **options):
    return louder(load_model(folder, dtype=torch.float32, device="cpu", **options))


def packed_logp(model, rows):
    batch = pack([sft_sample(row, [place > 0 for place in range(len(row))]) for row in rows])
    return logits(model, token_states(model, batch).hidden).log_softmax(-1)


def plain_logp(plain, folder, row):
    """As Hugging Face computes one sequence alone, from its processor's inputs."""
    ids, reader = np.array(row), reader_of(folder)
    pictures = [reader.read(run.name).inputs for run in runs_in(ids)]
    words = torch.tensor(np.where(ids >= FIRST_ID, plain.config.image_token_id, ids))[None]
    inputs = {name: torch.cat([each[name] for each in pictures]) for name in (pictures[0] if pictures else ())}
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (words == plain.config.image_token_id).int()
    elif plain.config.model_type == "gemma3" and inputs:
        inputs["token_type_ids"] = (words == plain.config.image_token_id).int()
    elif inputs:
        inputs = {name: tensor[None] for name, tensor in inputs.items()}
    plain.model.rope_deltas = None  # Which it remembers from one call to the next.
    return plain(input_ids=words, use_cache=False, **inputs).logits[0].log_softmax(-1)


def test_packed_rows_with_pictures_are_as_hugging_face_has_them_alone(seeing, prompts):
    ours = ours_of(seeing)
    plain = AutoModelForImageTextToText.from_pretrained(seeing, dtype=torch.float32, attn_implementation="eager").eval()
    louder(plain)
    want = torch.cat([plain_logp(plain, seeing, row) for row in prompts])
    got = packed_logp(ours, prompts)
    assert (got - want).abs().max() < TOLERANCE
    assert ours.reroll_eye.num_looks == 4  # Four pictures, of which the rows show eleven.
    assert (want[: len(prompts[0])] - want[-len(prompts[4]) :]).abs().max() > 1e-2  # What is seen shows.


def test_gradients_are_those_of_hugging_face_and_the_tower_has_none_unless_it_is_trained(seeing, prompts):
    ours = ours_of(seeing, train_vision=True)
    plain = louder(AutoModelForImageTextToText.from_pretrained(seeing, dtype=torch.float32, attn_implementation="eager").eval())
    packed_logp(ours, prompts)[:, 7].sum().backward()
    torch.cat([plain_logp(plain, seeing, row) for row in prompts])[:, 7].sum().backward()
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            assert (mine.grad - theirs.grad).abs().max() <= 1e-4 * max(1.0, float(theirs.grad.abs().max())), name
    frozen = ours_of(seeing)
    packed_logp(frozen, prompts)[:, 7].sum().backward()
    towers = [parameter for part in family_of(frozen.config).tower(frozen.base_model) for parameter in part.parameters()]
    assert towers
    assert not any(parameter.requires_grad for parameter in towers)


def drawn(engine, prompts, *, num=12):
    for number, row in enumerate(prompts):
        engine.submit(Request(id=str(number), prompt_ids=row, sampling=SamplingParams(max_tokens=num, seed=number)))
    found = {}
    while engine.num_unfinished:
        found |= {finished.request_id: finished.completion for finished in engine.step()}
    return [found[str(number)] for number in range(len(prompts))]


def gap_to_trainer(model, prompts, completions):
    rows = [(*row, *one.token_ids) for row, one in zip(prompts, completions, strict=True)]
    batch = pack(
        [
            sft_sample(row, [place >= len(prompt) for place in range(len(row))])
            for row, prompt in zip(rows, prompts, strict=True)
        ]
    )
    logp = logits(model, token_states(model, batch).hidden).log_softmax(-1)
    places = batch.loss_mask.nonzero().squeeze(1)
    told = torch.tensor([logprob for one in completions for logprob in one.logprobs])
    return float((logp[places - 1, batch.ids[places]] - told).detach().abs().max())


def test_the_engines_logprobs_are_the_trainers_and_it_looks_once_at_each_picture(seeing, prompts):
    trainer = ours_of(seeing)
    engine = EmbeddedEngine(ours_of(seeing), load_tokenizer(seeing), max_running=2)
    wrote = drawn(engine, prompts)
    assert gap_to_trainer(trainer, prompts, wrote) < TOLERANCE
    assert engine._runner.eye.num_looks == 4
    assert engine.counts.num_reused_tokens > 0


def test_a_preempted_and_a_later_turn_stand_where_they_would_have_stood(seeing, prompts):
    trainer = ours_of(seeing)
    alone = drawn(EmbeddedEngine(ours_of(seeing), load_tokenizer(seeing), max_running=1, max_cached=0), prompts)
    one = len(prompts[2]) * 2 * 2 * 2 * 16 * 4 * 2
    crowded = drawn(EmbeddedEngine(ours_of(seeing), load_tokenizer(seeing), max_running=5, cache_bytes=3 * one), prompts)
    assert [one.token_ids for one in alone] == [one.token_ids for one in crowded]
    again = [(*row, *one.token_ids, *prompts[4]) for row, one in zip(prompts[:2], alone, strict=False)]
    engine = EmbeddedEngine(ours_of(seeing), load_tokenizer(seeing), max_running=2)
    drawn(engine, prompts)
    assert gap_to_trainer(trainer, again, drawn(engine, again)) < TOLERANCE


def test_new_weights_of_the_tower_are_looked_through_anew(seeing, prompts):
    engine = EmbeddedEngine(ours_of(seeing, train_vision=True), load_tokenizer(seeing), max_running=2)
    drawn(engine, prompts[:1])
    changed = ours_of(seeing, train_vision=True)
    with torch.no_grad():
        for part in family_of(changed.config).tower(changed.base_model):
            for parameter in part.parameters():
                parameter.mul_(1.3)
    engine.load_weights({name: weight.detach().clone() for name, weight in changed.named_parameters()}, version=1)
    assert gap_to_trainer(changed, prompts[:1], drawn(engine, prompts[:1])) < TOLERANCE


def test_what_a_frozen_tower_said_outlives_a_push_and_not_a_change_of_the_tower(seeing, prompts):
    engine = EmbeddedEngine(ours_of(seeing), load_tokenizer(seeing), max_running=2)
    eye = engine._runner.eye
    drawn(engine, prompts[:1])
    other = dict(ours_of(seeing).named_parameters())
    trained = {name: weight.detach().clone() for name, weight in other.items() if weight.requires_grad}
    engine.load_weights(trained, version=1)
    drawn(engine, prompts[:1])
    assert eye.num_looks == 2, "two pictures, each looked at once"
    engine.load_weights({name: weight.detach().clone() for name, weight in other.items()}, version=2)  # Elsewhere in memory.
    drawn(engine, prompts[:1])
    assert eye.num_looks == 4


def test_a_picture_that_two_steps_would_read_is_read_in_one(seeing, prompts, monkeypatch):
    monkeypatch.setattr(embedded, "_MAX_PREFILL_TOKENS", 18)
    engine = EmbeddedEngine(ours_of(seeing), load_tokenizer(seeing), max_running=2)
    assert gap_to_trainer(ours_of(seeing), prompts, drawn(engine, prompts)) < TOLERANCE


def test_a_step_of_the_trainer_is_one_of_pytorchs_own_optimizer(seeing, prompts):
    ours = ours_of(seeing, train_vision=True)
    plain = louder(AutoModelForImageTextToText.from_pretrained(seeing, dtype=torch.float32, attn_implementation="eager").eval())
    optim = OptimConfig(lr=1e-4)
    strategy = TorchStrategy(ours, load_tokenizer(seeing), TorchStrategyConfig(precision="fp32"), optim, total_steps=10)
    batch = pack([sft_sample(row, [place > 0 and token < FIRST_ID for place, token in enumerate(row)]) for row in prompts])
    strategy.forward_backward(batch, SFT_LOSS)
    strategy.optim_step()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=0.0)
    logp = torch.cat([plain_logp(plain, seeing, row) for row in prompts])
    places = batch.loss_mask.nonzero().squeeze(1)
    (-logp[places - 1, batch.ids[places]].sum() / len(places)).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), optim.clip_norm)
    optimizer.step()
    with torch.no_grad():
        want = torch.cat([plain_logp(plain, seeing, row) for row in prompts])
        assert (packed_logp(ours, prompts) - want).abs().max() < 2e-4  # Adam divides by the size of a gradient.
        assert (want - logp).abs().max() > 1e-2


def test_what_is_saved_opens_again_with_its_processor(seeing, prompts, tmp_path):
    save_model(load_model(seeing, dtype=torch.float32, device="cpu"), load_tokenizer(seeing), tmp_path)
    again = load_model(str(tmp_path), dtype=torch.float32, device="cpu")
    first = load_model(seeing, dtype=torch.float32, device="cpu")
    assert torch.equal(packed_logp(again, prompts), packed_logp(first, prompts))


def test_an_adapter_is_for_the_words_alone_and_does_what_its_product_does_in_the_weights(seeing, prompts):
    pytest.importorskip("peft")
    model = load_model(seeing, dtype=torch.float32, device="cpu", lora=LoraConfig(rank=2, alpha=4))
    plain = AutoModelForImageTextToText.from_pretrained(seeing, dtype=torch.float32, attn_implementation="eager").eval()
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    assert trained
    assert not [name for name in trained if "vis" in name or "connector" in name or "projector" in name]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in [name for name in trained if ".lora_A." in name]:
            first, second = parameters[name], parameters[name.replace(".lora_A.", ".lora_B.")]
            second.copy_(0.1 * torch.randn(second.shape, generator=generator))
            plain.get_submodule(name.partition(".lora_A.")[0]).weight.add_(2 * second @ first)
        want = torch.cat([plain_logp(plain, seeing, row) for row in prompts])
        assert (packed_logp(model, prompts) - want).abs().max() < TOLERANCE


def test_a_picture_for_a_model_that_reads_text_is_refused(tmp_path):
    renderer = Renderer(load_tokenizer(str(make_tiny(tmp_path / "text"))))
    with pytest.raises(ModelError, match=r"models of family 'llama' are shown no pictures, since it reads text only"):
        renderer.start([message("user", picture(0), "?")])


def test_a_placeholder_that_is_said_is_told(seeing):
    renderer = Renderer(load_tokenizer(seeing))
    placeholder = reader_of(seeing).family.placeholder
    with pytest.raises(DataError, match="1 pictures, and 2 times"):
        renderer.start([message("user", picture(0), f"what is {placeholder}?")])
