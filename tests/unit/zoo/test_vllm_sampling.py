from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from vllm import SamplingParams as VllmParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from reroll.infer.embedded.sampler import RowSampling, sample
from reroll_zoo.vllm.sampling import SamplingProcessor, sampling_args


def params(row, *, name="a", num_held_back=0):
    return VllmParams(temperature=0.0, extra_args=sampling_args(name, row, num_held_back=num_held_back))


def update(size, *, added=(), removed=(), moved=()):
    return BatchUpdate(batch_size=size, added=list(added), removed=list(removed), moved=list(moved))


def drawn(processor, logits):
    """What vLLM takes, greedily, and the number it reports."""
    processed = processor.apply(logits.clone())
    tokens = processed.argmax(-1)
    return tokens.tolist(), processed.gather(1, tokens[:, None])[:, 0].tolist()


PLAIN = [RowSampling(seed=1), RowSampling(seed=2, temperature=0.5), RowSampling(seed=-3), RowSampling(seed=4, temperature=0.0)]
ROWS = [
    RowSampling(seed=1),
    RowSampling(seed=2, temperature=0.5),
    RowSampling(seed=3, top_k=2, top_p=0.9),
    RowSampling(seed=4, temperature=0.0),
]
LOGITS = 3 * torch.randn((4, 40), generator=torch.Generator().manual_seed(0))


def seated(rows=ROWS, *, num_held_back=0):
    processor = SamplingProcessor(None, torch.device("cpu"), False)
    written = [[] for _ in rows]
    added = [
        (i, params(row, name=str(i), num_held_back=num_held_back), [5] * (i + 1), written[i]) for i, row in enumerate(rows)
    ]
    processor.update_state(update(4, added=added))
    return processor, written


@pytest.mark.parametrize("rows", [PLAIN, ROWS], ids=["plain", "cut"])
def test_each_row_is_drawn_as_the_embedded_engine_draws_it(rows):
    processor, written = seated(rows)
    assert drawn(processor, LOGITS) == sample(LOGITS, rows, [1, 2, 3, 4])
    for tokens in written:
        tokens.append(7)
    assert drawn(processor, LOGITS) == sample(LOGITS, rows, [2, 3, 4, 5])


@pytest.mark.parametrize("rows", [PLAIN, ROWS], ids=["plain", "cut"])
def test_the_log_probs_of_a_step_are_told_by_name_also_when_the_next_one_was_launched(rows):
    processor, written = seated(rows)
    steps = []
    for _ in range(2):
        _, logprobs = drawn(processor, LOGITS)
        steps.append((processor.logprobs, dict(zip("0123", logprobs, strict=True))))
        for tokens in written:
            tokens.append(-1)
    for told, expected in steps:
        assert told.by_name() == expected


@pytest.mark.parametrize(
    "forbidden", [[(7, 9)] * 4, [(7, 9), (3,), (), (0, 1, 2)]], ids=["the same tokens", "other tokens for each"]
)
def test_tokens_are_held_back_from_every_row_for_as_long_as_it_is_early(forbidden):
    rows = [replace(row, forbidden=tokens) for row, tokens in zip(PLAIN, forbidden, strict=True)]
    processor, written = seated(rows, num_held_back=1)
    assert drawn(processor, LOGITS) == sample(LOGITS, rows, [1, 2, 3, 4])
    for tokens in written[1:]:
        tokens.append(7)
    assert drawn(processor, LOGITS) == sample(LOGITS, [rows[0], *PLAIN[1:]], [1, 3, 4, 5])


def test_rows_follow_their_requests_when_the_batch_changes():
    processor, written = seated()
    written[3] += [7, 7]
    processor.update_state(update(3, removed=[1], moved=[(3, 1, MoveDirectionality.UNIDIRECTIONAL)]))
    processor.update_state(update(3, moved=[(0, 2, MoveDirectionality.SWAP)]))
    assert drawn(processor, LOGITS[:3]) == sample(LOGITS[:3], [ROWS[2], ROWS[3], ROWS[0]], [3, 6, 1])


def test_held_back_tokens_are_not_drawn_too_early_and_their_log_prob_is_the_whole_distributions():
    processor, written = SamplingProcessor(None, torch.device("cpu"), False), []
    row = RowSampling(seed=1, temperature=0.0, forbidden=(int(LOGITS[0].argmax()),))
    processor.update_state(update(1, added=[(0, params(row, num_held_back=1), [5], written)]))
    [early], [logprob] = drawn(processor, LOGITS[:1])
    assert early == LOGITS[0].topk(2).indices[1]
    assert logprob == pytest.approx(LOGITS[0].log_softmax(-1)[early].item(), abs=1e-6)
    written.append(early)
    assert drawn(processor, LOGITS[:1])[0] == [int(LOGITS[0].argmax())]


def test_before_there_are_requests_logits_pass():
    assert torch.equal(SamplingProcessor(None, torch.device("cpu"), False).apply(LOGITS), LOGITS)
