"""Problems, prompts and tokens: datasets, the DeepSeek-V4 chat encoding, tokenizers and a resumable loader."""

from nemo_rl_dsv4.data.chat import encode_chat
from nemo_rl_dsv4.data.datasets import build_dataset, build_datasets
from nemo_rl_dsv4.data.loader import Prompt, PromptLoader
from nemo_rl_dsv4.data.problem import Problem
from nemo_rl_dsv4.data.tokenizer import Tokenizer, load_tokenizer, make_tiny_tokenizer

__all__ = [
    "Problem",
    "Prompt",
    "PromptLoader",
    "Tokenizer",
    "build_dataset",
    "build_datasets",
    "encode_chat",
    "load_tokenizer",
    "make_tiny_tokenizer",
]
