"""The kinds of files of a model, their flags and the names of their tensors."""

from collections.abc import Collection
from typing import NamedTuple

TEXT_PROJECTION = "text_embedding_projection."  # prefix of its tensors in a checkpoint


class Kind(NamedTuple):
    """A kind of file."""

    title: str  # for messages
    flag: str  # of the file
    sections: tuple[str, ...] = ()  # of the config that describe it
    # Of its tensors in a checkpoint. Its own file may leave out the only one
    prefixes: tuple[str, ...] = ()
    own: tuple[str, ...] = ()  # prefixes by which its file is known, whatever its metadata

    def is_in(self, names: Collection[str]) -> bool:
        """Whether a file's tensors are of all kinds of the part, with a checkpoint's names."""
        return all(any(name.startswith(prefix) for name in names) for prefix in self.prefixes)


# Results of model_files.kind_of
KINDS = {
    "": Kind("file without known metadata", ""),
    "transformer": Kind("transformer", "--checkpoint-path"),
    "gemma": Kind("text encoder", "--gemma-root"),
    "video_vae": Kind(
        "video VAE",
        "--video-vae-path",
        ("vae",),
        ("vae.",),
        ("per_channel_statistics.", "vae.per_channel_statistics."),
    ),
    "audio_vae": Kind(
        "audio VAE",
        "--audio-vae-path",
        ("audio_vae", "vocoder"),
        ("audio_vae.", "vocoder."),
        ("audio_vae.", "vocoder."),
    ),
    # LTX-2.5's is in the file of the text encoder.
    "text_projection": Kind(
        "text projection",
        "--text-projection-path",
        (),
        (TEXT_PROJECTION,),
        ("video_aggregate_embed.", f"{TEXT_PROJECTION}video_aggregate_embed."),
    ),
    "spatial": Kind("spatial upsampler", "--spatial-upsampler-path"),
    "temporal": Kind("temporal upsampler", "--temporal-upsampler-path"),
    "duration_head": Kind("duration head", "--duration-head-path"),
    "lora": Kind("LoRA", "--lora"),
}
# Parts of a checkpoint that may have a file of their own
PARTS = {name: kind for name, kind in KINDS.items() if kind.prefixes}
