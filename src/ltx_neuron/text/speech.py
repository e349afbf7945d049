"""Whether a prompt names speech. Without it the model often keeps lips still, even where it hears a
voice."""

import re

# Marks of a quotation in any script. An apostrophe is one only outside of a word.
_QUOTATION = re.compile("[\"“”„‟«»‹›「」『』《》〈〉＂]|(?<!\\w)['‘‚].+?['’‘](?!\\w)", re.DOTALL)
# Beginnings of words in languages that need no letters beyond ASCII, then whole words.
_WORDS = re.compile(
    r"\b((speak|speech|spoke|talk|sing(er|ing)|voice|vocal|narrat|dialog|convers|whisper|shout|yell"
    r"|lip|recit|interview|announc|lyric"
    r"|parl|chant|cant[ao]|voix|voce|voz|habl|dic[eho]|fala|stimm|sprech|sprich|rede[nt]|singt)\w*"
    r"|says?|said|saying|tells?|told|sings?|sang|sung|rap(s|per|ping)?|asks?|answers?|dit|sag(t|en))\b",
    re.IGNORECASE,
)

NO_SPEECH = (
    "the prompt names no speech, so lips may stay still; name it, as in: a woman says good morning"
)


def names_speech(prompt: str) -> bool:
    """Whether a prompt has a quotation or a word of speech. True for a prompt with letters beyond
    ASCII, whose language these words do not cover."""
    foreign = any(letter.isalpha() and not letter.isascii() for letter in prompt)
    return foreign or bool(_QUOTATION.search(prompt) or _WORDS.search(prompt))
