"""Prompts in the order of the embedded trainer's loader, resumed where they stopped."""

import pytest
import torch

from nemo_rl_dsv4.data import Problem, PromptLoader, make_tiny_tokenizer
from nemo_rl_dsv4.environments.single_turn import environment_metadata
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.integrations.nemo_rl.data import TASK, BatchOrder, PromptDataset, problem_of_messages
from nemo_rl_dsv4.integrations.nemo_rl.run import LoopTokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture
def make_loader(tokenizer):
    def make(count=7, batch=2, seed=3):
        problems = [Problem(f"{n} + 1 ?", str(n + 1), metadata={"dataset": "d", "n": n}) for n in range(count)]
        return PromptLoader(problems, tokenizer, batch, seed, True, 64)

    return make


def numbers(loader, batches):
    return [[loader.prompts[index].problem.metadata["n"] for index in batch] for batch in batches]


def test_epochs_have_the_order_of_the_loader(make_loader):
    loader, order = make_loader(), BatchOrder(make_loader())
    wanted = [[prompt.problem.metadata["n"] for prompt in loader.next_batch()] for _ in range(6)]
    assert len(order) == 3
    assert numbers(loader, [*order, *order]) == wanted


@pytest.mark.parametrize("taken", [1, 3])
def test_a_state_goes_on_behind_the_last_batch(make_loader, taken):
    """Also when it was the last of its epoch: the epoch then ends without a batch, and the next one begins."""
    order = BatchOrder(make_loader())
    batches = iter(order)
    seen = [next(batches) for _ in range(taken)]
    resumed = BatchOrder(make_loader())
    resumed.load_state_dict(order.state_dict())
    assert seen + list(resumed) == list(BatchOrder(make_loader()))
    assert list(resumed) == [*BatchOrderOfEpoch(make_loader(), 1)]


class BatchOrderOfEpoch(BatchOrder):
    def __init__(self, loader, epoch):
        super().__init__(loader)
        self.epoch = epoch


def test_the_state_of_other_prompts_is_refused(make_loader):
    state = BatchOrder(make_loader(seed=4)).state_dict()
    with pytest.raises(UserError, match="has seed 4, this run has 3"):
        BatchOrder(make_loader()).load_state_dict(state)


def test_a_prompt_becomes_the_row_that_the_loop_reads(make_loader, tokenizer):
    loader = make_loader()
    row = PromptDataset(loader.prompts, tokenizer)[4]
    (message,) = row["message_log"]
    assert message["token_ids"].tolist() == loader.prompts[4].token_ids and row["length"] == len(message["token_ids"])
    assert message["role"] == "user" and "4 + 1" in message["content"]
    assert row["extra_env_info"] == environment_metadata(loader.prompts[4].problem)
    assert (row["task_name"], row["loss_multiplier"], row["idx"]) == (TASK, 1.0, 4)


def test_the_loops_tokenizer_decodes_and_encodes(tokenizer):
    loop = LoopTokenizer(tokenizer)
    ids = tokenizer.encode("2 + 3 ?")
    assert loop.batch_decode([torch.tensor(ids), [*ids, tokenizer.eos_id]], skip_special_tokens=True) == ["2 + 3 ?"] * 2
    assert loop("2 + 3 ?").input_ids.tolist() == [ids]
    empty = loop("", return_tensors="pt", add_special_tokens=False).input_ids
    assert empty.shape == (1, 0) and empty.dtype == torch.int64
    assert loop.pad_token_id == tokenizer.pad_id


def test_rows_of_a_response_set_become_problems():
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    assert problem_of_messages({"messages": messages}, "gsm8k") == Problem("1 + 1?", "2", metadata={"dataset": "gsm8k"})
    asked = problem_of_messages({"messages": [{"role": "system", "content": "Be brief."}, *messages]}, "gsm8k")
    assert asked.system == "Be brief." and asked.answer == "2"
    with pytest.raises(UserError, match=r"a row of gsm8k has messages by \['user'\]"):
        problem_of_messages({"messages": messages[:1]}, "gsm8k")
    with pytest.raises(UserError, match="a row of gsm8k has messages by None"):
        problem_of_messages({"prompt": "1 + 1?"}, "gsm8k")
