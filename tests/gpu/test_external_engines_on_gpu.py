"""vLLM and sglang on a CUDA device: whichever way weights come, their log-probs are the trainer's under them."""

import gc
import importlib.util
import os

import pytest
import torch

from reroll.models.attention import PackedAttention, hidden_states, logits
from reroll.models.load import load_model
from reroll.types import Request, SamplingParams
from reroll_zoo.sglang.config import SglangConfig
from reroll_zoo.tiny_models import make_tiny
from reroll_zoo.vllm.config import VllmEngineConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MEMORY = 0.05
"""Share of the GPU."""
NEAR, FAR = 0.1, 0.5
"""How far log-probs in bf16 may be from the trainer's, and how far those of other weights are at least."""
HOW = ["whole", "parts", "parts and a rest"]
SGLANG_PYTHON = "REROLL_SGLANG_PYTHON"


def open_vllm(folder, **options):
    from reroll_zoo.vllm.engine import VllmEngine

    config = VllmEngineConfig(kind="vllm", max_running=8, gpu_memory_utilization=MEMORY, **options)
    return VllmEngine.open(folder, config, precision="bf16", device="cuda:0")


def open_sglang(folder, **options):
    from reroll_zoo.sglang.engine import SglangEngine

    config = SglangConfig(
        kind="sglang",
        python=os.environ[SGLANG_PYTHON],
        max_running=8,
        gpu_memory_utilization=MEMORY,
        sleep=True,
        options={"attention_backend": "triton"},  # Others take no heads of 32.
        **options,
    )
    return SglangEngine.open(folder, config, precision="bf16", device="cuda:0")


def external_engines():
    """Each, eager with a tied head and with graphs and a head of its own."""
    missing = {
        open_vllm: None if importlib.util.find_spec("vllm") else "vllm is not installed",
        open_sglang: None if SGLANG_PYTHON in os.environ else f"{SGLANG_PYTHON} names no Python with sglang",
    }
    for opens, reason in missing.items():
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        for is_eager in (True, False):
            name = f"{opens.__name__.removeprefix('open_')}, {'eager, tied' if is_eager else 'graphs, untied'}"
            yield pytest.param((opens, is_eager), id=name, marks=marks)


@pytest.fixture(scope="module", params=external_engines())
def opened(request, tmp_path_factory):
    opens, is_eager = request.param
    folder = make_tiny(
        tmp_path_factory.mktemp("model"),
        family="qwen3" if is_eager else "llama",
        hidden=128,
        max_positions=512,
        initializer_range=0.1,
        tie_embeddings=is_eager,
    )
    engine = opens(str(folder), enforce_eager=is_eager)
    yield engine, str(folder)
    engine.close()
    del engine
    gc.collect()


@pytest.fixture
def old(opened):
    return load_model(opened[1], dtype=torch.bfloat16, device="cuda")


@pytest.fixture
def engine(opened, old):
    """With the weights of the folder."""
    opened[0].load_weights(dict(old.named_parameters()), version=0)
    return opened[0]


@pytest.fixture
def new(opened):
    """Other weights."""
    model = load_model(opened[1], dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator, device="cuda"))
    return model


def requests(**sampling):
    return [
        Request(
            id=f"{i}.{j}",
            prompt_ids=tuple(range(5, 8 + 19 * i)),
            sampling=SamplingParams(max_tokens=12, min_tokens=6, seed=10 * i + j, **sampling),
        )
        for i in range(4)
        for j in range(3)
    ]


def finish(engine):
    done = {}
    while engine.num_unfinished:
        done |= {finished.request_id: finished.completion for finished in engine.step()}
    return done


def gap(model, asked, done):
    """Between the log-probs that an engine reported and the trainer's."""
    gaps = []
    for request in asked:
        completion = done[request.id]
        ids = torch.tensor([*request.prompt_ids, *completion.token_ids], device="cuda")
        attention = PackedAttention(torch.tensor([0, len(ids)], device="cuda"))
        with torch.no_grad():
            scores = logits(model, hidden_states(model, ids, torch.arange(len(ids), device="cuda"), attention)).float()
        scores = torch.log_softmax(scores[:-1] / (request.sampling.temperature or 1.0), -1)
        want = scores.gather(1, ids[1:, None])[len(request.prompt_ids) - 1 :, 0].cpu()
        gaps.append((torch.tensor(completion.logprobs) - want).abs().max().item())
    return max(gaps)


def gap_of(model, engine, **sampling):
    """The same, for requests that it is given now."""
    asked = requests(**sampling)
    for request in asked:
        engine.submit(request)
    return gap(model, asked, finish(engine))


def push(engine, model, how, *, version=1):
    """Send weights; those of a part are lent for as long as it takes to hand them over."""
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    names = list(weights)
    num_in_parts = {"whole": 0, "parts": len(names), "parts and a rest": len(names) // 2}[how]
    for start in range(0, num_in_parts, 3):
        part = {name: weights.pop(name) for name in names[start : min(start + 3, num_in_parts)]}
        assert engine.load_part(part) == {}
        for tensor in part.values():
            tensor.zero_()
    engine.load_weights(weights, version=version)
    for tensor in weights.values():
        tensor.zero_()


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_p": 0.8, "top_k": 20}],
    ids=["whole vocabulary", "cool", "greedy", "cut"],
)
def test_logprobs_are_the_trainers_however_tokens_are_drawn(engine, old, sampling):
    assert gap_of(old, engine, **sampling) < NEAR


@pytest.mark.parametrize("how", HOW)
def test_new_weights_are_used_and_the_old_ones_after_them(engine, old, new, how):
    push(engine, new, how)
    assert gap_of(new, engine) < NEAR
    assert gap_of(old, engine) > FAR
    push(engine, old, how)
    assert gap_of(old, engine) < NEAR


@pytest.mark.parametrize("how", HOW)
def test_new_weights_that_come_while_it_sleeps_are_used_when_it_wakes(engine, new, how):
    engine.sleep()
    push(engine, new, how)
    engine.wake()
    assert gap_of(new, engine) < NEAR


@pytest.mark.parametrize("how", HOW)
def test_weights_stay_where_graphs_look_for_them(engine, new, how):
    if not hasattr(engine, "_llm"):
        pytest.skip("sglang's are in another process")

    def places(model):
        return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}

    before = engine._llm.apply_model(places)
    push(engine, new, how)
    assert engine._llm.apply_model(places) == before


def test_requests_in_flight_go_on_under_weights_that_came_in_parts(engine, new):
    engine.submit(Request(id="a", prompt_ids=(5, 9), sampling=SamplingParams(max_tokens=12, min_tokens=12)))
    for _ in range(4):
        engine.step()
    push(engine, new, "parts", version=3)
    assert finish(engine)["a"].versions == ((0, 5), (3, 7))  # The fifth was in flight.


def test_weights_that_leave_one_out_or_do_not_fit_are_refused(engine, old):
    weights = dict(old.named_parameters())
    first, *others = weights
    with pytest.raises(ValueError, match="missing"):
        engine.load_weights({name: weights[name] for name in others}, version=1)
    engine.load_part({name: weights[name] for name in others})
    with pytest.raises(ValueError, match="missing"):
        engine.load_weights({}, version=1)
    with pytest.raises(ValueError, match="shape"):
        engine.load_part({first: weights[first][:1]})
    engine.load_weights({first: weights[first]}, version=1)
    assert gap_of(old, engine) < NEAR


def test_sleep_frees_the_gpu_and_wake_goes_on_with_requests_in_flight(engine, old):
    asked = requests()
    for request in asked:
        engine.submit(request)
    done = {finished.request_id: finished.completion for _ in range(8) for finished in engine.step()}
    assert engine.num_unfinished > 0
    free, total = torch.cuda.mem_get_info()
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] - free > MEMORY / 2 * total
    engine.wake()
    assert gap(old, asked, done | finish(engine)) < NEAR
