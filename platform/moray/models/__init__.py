"""Which families of models are supported (`families`), and GGUF files as models: `gguf_file` makes an ordinary Hugging
Face folder of one, `gguf_tokenizer` its tokenizer."""

from pathlib import Path


def folder_of(model: str) -> Path | None:
    """The Hugging Face folder of a GGUF file, converted at the first call; None if a model is none.

    Raises:
        ConfigError: the file cannot be converted.
    """
    file = Path(model)
    if file.suffix != ".gguf" or not file.is_file():
        return None
    from moray.models.gguf_file import converted_folder

    return converted_folder(file)
