"""The demo's text side: a tokenizer, a small Gemma3, the text projections and the connectors.

python tools/train_demo/text.py [--folder DIR] [--held-out]

Gemma3 learns the grammar's sentences as a causal language model and is frozen. Then projections
and connectors learn, through ltx-core's modules, to let a scene be read from the contexts that they
make: from the mean of all 1024 vectors, and from any one of them, by linear probes that are thrown
away. Every register so learns to carry the prompt, which is what the DiT's cross-attention reads.

Writes gemma/ and text.safetensors (published names) to the folder. --held-out: a fifth of the
phrasings is kept from the training, and contexts of them are tested; nothing is written.
"""

import argparse
import json
import tempfile
import zlib
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import config
import torch
import torch.nn.functional as F
import training
import world
from tiny.gemma import (
    BYTE_TOKENS,
    CORPUS,
    SPECIAL_TOKENS,
    gemma_weights,
    published_gemma_name,
    write_gemma_settings,
)
from tiny.weights import DIFFUSION
from torch import Tensor, nn

TOKENS, REGISTERS = 1024, 128  # vectors of a context; those that pad it are these, over and over
PROMPT_TOKENS = 48  # of the grammar's longest sentence, at most
ATTRIBUTES = {
    "colour": tuple(world.COLOURS),
    "shape": world.SHAPES,
    "direction": tuple(world.DIRECTIONS),
    "speed": tuple(world.SPEEDS),
    "ground": tuple(world.GROUNDS),
}
LANGUAGE = {"steps": 400, "batch": 32, "peak": 4e-3}
CONTEXT = {"steps": 500, "batch": 16, "places": 16, "peak": 3e-3}
# Taken from the scores of registers, less and less until half of the steps are done: they are a
# thousand, and would drown the words before attention has learnt to look for them.
HUSH = 6.0
SEED = 16


class Prompts(NamedTuple):
    """Sentences, and the numbers (P, 5) of what they say, in ATTRIBUTES' order."""

    sentences: list[str]
    said: Tensor


def draw(count: int, generator: torch.Generator, keep=lambda phrasing: True) -> Prompts:
    """Sentences of random scenes whose phrasing is to be kept."""
    sentences, said = [], []
    while len(sentences) < count:
        scene = world.Scene.draw(generator)
        sentence = scene.prompt(generator)
        if keep(phrasing(sentence, scene)):
            sentences.append(sentence)
            said.append([names.index(getattr(scene, a)) for a, names in ATTRIBUTES.items()])
    return Prompts(sentences, torch.tensor(said))


def phrasing(sentence: str, scene: world.Scene) -> str:
    """A sentence without the names of its scene: how it is said."""
    for attribute in ("colour", "shape", "ground"):
        sentence = sentence.replace(getattr(scene, attribute), attribute)
    return sentence


def held_out(phrase: str) -> bool:
    """Whether a phrasing is one of the fifth that a test keeps from the training."""
    return zlib.crc32(phrase.encode()) % 5 == 0


def train_tokenizer(vocabulary: int) -> dict:
    """tokenizer.json: a byte-pair tokenizer of Gemma's kind, with byte fallback.

    Letters are made small, and a space is put first: a word is the same tokens wherever it stands.
    Every word of the grammar is one token; any other English is pieces and letters.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    pairs = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    pairs.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    pairs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("▁", "merged_with_next"), pre_tokenizers.Punctuation()]
    )
    pairs.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL_TOKENS + BYTE_TOKENS, show_progress=False
    )
    sentences = draw(4000, torch.Generator().manual_seed(SEED)).sentences
    alphabet = "abcdefghijklmnopqrstuvwxyz 0123456789 . , ; : ! ? ' \" ( ) - / & % "
    pairs.train_from_iterator([*sentences, CORPUS * 20, alphabet * 5], trainer)
    pairs.post_processor = processors.TemplateProcessing(
        single="<bos> $A",
        pair="<bos> $A <bos> $B",
        special_tokens=[("<bos>", SPECIAL_TOKENS.index("<bos>"))],
    )
    content = json.loads(pairs.to_str())
    # As in tiny: bytes count as text.
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] in SPECIAL_TOKENS
    ]
    return content


def write_gemma(root: Path) -> None:
    """A folder as published, with random weights."""
    root.mkdir(parents=True, exist_ok=True)
    settings = write_gemma_settings(root, config.GEMMA)
    tokenizer = train_tokenizer(config.GEMMA.gemma_vocab)
    (root / "tokenizer.json").write_text(json.dumps(tokenizer) + "\n")
    training.save_weights(root / "model.safetensors", gemma_weights(settings, SEED), PUBLISHED)


PUBLISHED = {"format": "pt"}  # metadata that transformers asks for


class TextEncoder(nn.Module):
    """From sentences to the DiT's contexts, many at once, by ltx-core's modules in fp32.

    root  a Gemma folder, with the weights to begin with
    """

    def __init__(self, root: Path):
        super().__init__()
        from ltx_core.text_encoders.gemma.embeddings_connector import (
            AudioEmbeddings1DConnectorConfigurator,
            Embeddings1DConnectorConfigurator,
        )
        from ltx_core.text_encoders.gemma.feature_extractor import FeatureExtractorV2
        from transformers import Gemma3ForConditionalGeneration

        torch.manual_seed(SEED)
        self.root = root
        self.gemma = Gemma3ForConditionalGeneration.from_pretrained(root, dtype=torch.float32)
        demo, hidden = config.demo_config(), config.GEMMA.gemma_hidden
        features = hidden * (config.GEMMA.gemma_layers + 1)
        self.extractor = FeatureExtractorV2(
            nn.Linear(features, config.INNER), hidden, nn.Linear(features, config.AUDIO_INNER)
        )
        self.video = Embeddings1DConnectorConfigurator.from_config(demo).float()
        self.audio = AudioEmbeddings1DConnectorConfigurator.from_config(demo).float()

    @cached_property
    def tokenizer(self):
        from ltx_core.text_encoders.gemma.tokenizer import LTXVGemmaTokenizer

        return LTXVGemmaTokenizer(str(self.root), TOKENS).tokenizer

    def tokenize(self, sentences: list[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask (P, longest), padded on the left."""
        stripped = [sentence.strip() for sentence in sentences]
        batch = self.tokenizer(stripped, padding="longest", truncation=True, return_tensors="pt")
        return batch.input_ids, batch.attention_mask

    def features(self, sentences: list[str]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Both streams' projections (P, longest, channels) of all hidden states, and the mask.
        A mask of left padding gives the hidden states of any other left padding."""
        ids, mask = self.tokenize(sentences)
        with torch.no_grad():
            states = self.gemma.model.language_model(
                input_ids=ids, attention_mask=mask, output_hidden_states=True
            ).hidden_states
        return self.extractor(states, mask), mask

    def forward(
        self, sentences: list[str], places: Tensor | None = None, hush: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Contexts (P, 1024, channels) of the video and of the audio stream, or the vectors (P, Q,
        channels) of the places (Q,) alone."""
        features, mask = self.features(sentences)
        counts = mask.sum(1)
        places = torch.arange(TOKENS) if places is None else places
        return tuple(
            run_connector(connector, each, counts, places, hush)
            for connector, each in zip((self.video, self.audio), features, strict=True)
        )

    def published(self) -> dict[str, Tensor]:
        """Projections and connectors under their published names."""
        parts = {
            "text_embedding_projection.": self.extractor,
            DIFFUSION + "video_embeddings_connector.": self.video,
            DIFFUSION + "audio_embeddings_connector.": self.audio,
        }
        return {
            prefix + name: weight
            for prefix, part in parts.items()
            for name, weight in part.state_dict().items()
        }

    def load(self, path: Path) -> "TextEncoder":
        """Take projections and connectors from a file of published names."""
        for prefix, part in (
            ("text_embedding_projection.", self.extractor),
            (DIFFUSION + "video_embeddings_connector.", self.video),
            (DIFFUSION + "audio_embeddings_connector.", self.audio),
        ):
            part.load_state_dict(training.load_part(path, prefix))
        return self


def run_connector(
    connector: nn.Module, features: Tensor, counts: Tensor, places: Tensor, hush: float = 0.0
) -> Tensor:
    """Vectors (P, Q, channels) of ltx-core's connector of one block, at some of its places.

    features  (P, longest, channels), padded on the left
    counts    (P,) tokens of each prompt
    places    (Q,) of the 1024 vectors
    hush      is taken from the scores of registers

    Its own forward takes one prompt at a time and all places. As registers are the same for every
    prompt, their keys and values are computed once.
    """
    from ltx_core.utils import rms_norm

    (block,) = connector.transformer_1d_blocks
    attention, longest = block.attn1, features.shape[1]
    column = torch.arange(longest) + (longest - counts[:, None])  # of a token in features
    tokens = features.gather(
        1, column.clamp(max=longest - 1)[..., None].expand(-1, -1, features.shape[2])
    )
    registers = connector.learnable_registers[None]
    is_token = (places < counts[:, None])[..., None]
    hidden = torch.where(
        is_token, tokens[:, places.clamp(max=longest - 1)], registers[:, places % REGISTERS]
    )
    queries = _rotated(attention.q_norm(attention.to_q(rms_norm(hidden))), places, attention.heads)
    mixed = 0
    weights = _attention_weights(attention, queries, tokens, registers, counts, hush)
    for part, weight in zip((tokens, registers), weights, strict=True):
        values = attention.to_v(rms_norm(part)).unflatten(2, (attention.heads, -1))
        mixed = mixed + weight @ values.transpose(1, 2)
    gates = 2 * torch.sigmoid(attention.to_gate_logits(rms_norm(hidden)))[..., None]
    hidden = hidden + attention.to_out((mixed.transpose(1, 2) * gates).flatten(2))
    return rms_norm(hidden + block.ff(rms_norm(hidden)))


def _attention_weights(
    attention: nn.Module,
    queries: Tensor,
    tokens: Tensor,
    registers: Tensor,
    counts: Tensor,
    hush: float,
) -> tuple[Tensor, Tensor]:
    """Weights (P, heads, Q, longest) of the tokens and (P, heads, Q, 128) of the registers, each of
    which stands at many places."""
    from ltx_core.utils import rms_norm

    longest, all_places = tokens.shape[1], torch.arange(TOKENS)
    keys = [attention.k_norm(attention.to_k(rms_norm(part))) for part in (tokens, registers)]
    keys = [
        _rotated(keys[0], all_places[:longest], attention.heads),
        _rotated(keys[1].repeat(1, TOKENS // REGISTERS, 1), all_places, attention.heads),
    ]
    to_tokens, to_registers = (
        queries @ key.transpose(2, 3) / attention.dim_head**0.5 for key in keys
    )
    scores = torch.cat([to_tokens, to_registers - hush], -1)
    is_token = all_places < counts[:, None]
    absent = torch.cat([~is_token[:, :longest], is_token], 1)[:, None, None]
    scores = scores.masked_fill(absent, float("-inf"))
    weights = scores.softmax(-1)
    repeated = weights[..., longest:].unflatten(-1, (-1, REGISTERS))
    return weights[..., :longest], repeated.sum(-2)


def _rotated(vectors: Tensor, places: Tensor, heads: int) -> Tensor:
    """Queries or keys (P, T, channels) with the RoPE of their places (T,), as (P, heads, T, ..)."""
    from ltx_core.model.transformer.rope import LTXRopeType, apply_rotary_emb

    tables = tuple(table[:, :, places] for table in _rope_tables(vectors.shape[2], heads))
    parts = vectors.unflatten(2, (heads, -1)).transpose(1, 2)
    return apply_rotary_emb(parts, tables, LTXRopeType.SPLIT)


@cache
def _rope_tables(channels: int, heads: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1, heads, 1024, channels / heads / 2) of a connector's positions."""
    from ltx_core.model.transformer.rope import (
        LTXRopeType,
        generate_freq_grid_np,
        precompute_freqs_cis,
    )

    return precompute_freqs_cis(
        indices_grid=torch.arange(TOKENS, dtype=torch.float32)[None, None],
        dim=channels,
        out_dtype=torch.float32,
        theta=10000.0,
        max_pos=config.demo_config()["transformer"]["connector_positional_embedding_max_pos"],
        num_attention_heads=heads,
        rope_type=LTXRopeType.SPLIT,
        freq_grid_generator=generate_freq_grid_np,
    )


def contexts(folder: Path, sentences: list[str], batch: int = 16) -> tuple[Tensor, Tensor]:
    """Contexts (P, 1024, channels) of both streams in bf16, with the folder's frozen encoder."""
    encoder = frozen(folder)
    made = [encoder(sentences[i : i + batch]) for i in range(0, len(sentences), batch)]
    return tuple(torch.cat(stream).bfloat16() for stream in zip(*made, strict=True))


def frozen(folder: Path) -> TextEncoder:
    """The encoder that lies in a folder; its weights are rounded to bf16 there."""
    encoder = TextEncoder(folder / "gemma").load(folder / "text.safetensors")
    return encoder.eval().requires_grad_(False)


def train_language(encoder: TextEncoder, log: training.LossLog, keep) -> None:
    """Gemma3 as a causal language model of the grammar, then frozen, rounded to bf16."""
    generator = torch.Generator().manual_seed(SEED + 1)
    language = encoder.gemma.model.language_model

    def losses(step: int) -> dict[str, Tensor]:
        ids, mask = encoder.tokenize(draw(LANGUAGE["batch"], generator, keep).sentences)
        states = language(input_ids=ids, attention_mask=mask).last_hidden_state
        logits = encoder.gemma.lm_head(states[:, :-1])
        wanted = ids[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
        return {"language": F.cross_entropy(logits.flatten(0, 1), wanted.flatten())}

    training.train([language], losses, LANGUAGE["steps"], LANGUAGE["peak"], log)
    encoder.gemma.requires_grad_(False)
    round_weights(encoder.gemma)


def round_weights(module: nn.Module) -> None:
    """Round weights to bf16, as they are shipped."""
    for weight in module.parameters():
        weight.data = weight.data.bfloat16().float()


class Probe(nn.Module):
    """Reads all attributes from vectors of one stream, linearly."""

    def __init__(self, channels: int):
        super().__init__()
        self.read = nn.Linear(channels, sum(len(names) for names in ATTRIBUTES.values()))

    def forward(self, vectors: Tensor) -> list[Tensor]:
        """Vectors (P, channels) -> scores (P, names) of every attribute."""
        return self.read(vectors).split([len(names) for names in ATTRIBUTES.values()], -1)

    def loss(self, vectors: Tensor, said: Tensor) -> Tensor:
        """The mean over attributes of their cross-entropies."""
        scores = self(vectors)
        return sum(F.cross_entropy(each, said[:, i]) for i, each in enumerate(scores)) / len(scores)

    def right(self, vectors: Tensor, said: Tensor) -> Tensor:
        """Whether (P, 5) every attribute is read right."""
        return torch.stack([each.argmax(-1) for each in self(vectors)], -1) == said


def train_contexts(encoder: TextEncoder, log: training.LossLog, keep) -> nn.ModuleList:
    """Projections and connectors together with probes: of the mean vector and of any one vector,
    for video and for audio. Returns the probes."""
    generator = torch.Generator().manual_seed(SEED + 2)
    channels = (config.INNER, config.AUDIO_INNER)
    probes = nn.ModuleList(Probe(width) for width in (*channels, *channels))

    def losses(step: int) -> dict[str, Tensor]:
        prompts = draw(CONTEXT["batch"], generator, keep)
        # Some of the vectors stand for all: the loss is of their mean, and of each.
        places = torch.randint(TOKENS, (CONTEXT["places"],), generator=generator)
        hush = HUSH * max(0.0, 1 - 2 * step / CONTEXT["steps"])
        found, said = {}, prompts.said
        streams = zip(("video", "audio"), encoder(prompts.sentences, places, hush), strict=True)
        for i, (name, vectors) in enumerate(streams):
            found[f"{name} mean"] = probes[i].loss(vectors.mean(1), said)
            each = said.repeat_interleave(len(places), 0)
            found[f"{name} one"] = probes[2 + i].loss(vectors.flatten(0, 1), each)
        return found

    modules = [encoder.extractor, encoder.video, encoder.audio, probes]
    training.train(modules, losses, CONTEXT["steps"], CONTEXT["peak"], log)
    for module in modules[:3]:
        round_weights(module)
    return probes


@torch.no_grad()
def test(encoder: TextEncoder, probes: nn.ModuleList, log: training.LossLog, keep) -> None:
    """The share of scenes, of 200 new sentences, whose attributes are all read right: from means,
    and from the worst of 16 single vectors."""
    generator = torch.Generator().manual_seed(SEED + 3)
    right = {}
    for _ in range(20):
        prompts = draw(10, generator, keep)
        streams = zip(("video", "audio"), encoder(prompts.sentences), strict=True)
        for i, (name, context) in enumerate(streams):
            means = probes[i].right(context.mean(1), prompts.said).all(1)
            places = torch.randint(TOKENS, (16,), generator=generator)
            ones = [probes[2 + i].right(context[:, place], prompts.said) for place in places]
            right.setdefault(f"{name} mean right", []).append(means)
            right.setdefault(f"{name} one right", []).append(torch.stack(ones).all(-1).all(0))
    log.write(**{name: float(torch.cat(each).float().mean()) for name, each in right.items()})


def save_gemma(encoder: TextEncoder, root: Path) -> None:
    """Write Gemma's weights, rounded to bf16; the output layer is the embedding table."""
    weights = {
        published_gemma_name(name): weight
        for name, weight in encoder.gemma.state_dict().items()
        if not name.startswith("lm_head")
    }
    training.save_weights(root / "model.safetensors", training.rounded(weights), PUBLISHED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("demo16"))
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--contexts", action="store_true", help="with the Gemma that lies there")
    arguments = parser.parse_args()
    torch.set_num_threads(training.THREADS)
    run(arguments.folder, arguments.held_out, not arguments.contexts)


def run(folder: Path, holds_out: bool = False, language: bool = True) -> None:
    """Train everything, and test it. With `language` False, Gemma is the one that lies there."""
    log = training.LossLog(folder, "text-held-out" if holds_out else "text")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) if holds_out else folder / "gemma"
        if language:
            write_gemma(root)
        encoder = TextEncoder(root)
        trains = (lambda phrase: not held_out(phrase)) if holds_out else (lambda phrase: True)
        tests = held_out if holds_out else trains
        if language:
            train_language(encoder, log, trains)
            save_gemma(encoder, root)
        else:
            encoder.gemma.requires_grad_(False)
        probes = train_contexts(encoder, log, trains)
        if not holds_out:
            weights = training.rounded(encoder.published())
            training.save_weights(folder / "text.safetensors", weights)
        test(encoder, probes, log, tests)


if __name__ == "__main__":
    main()
