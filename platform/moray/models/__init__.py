"""Which families of models are supported (`families`), and GGUF files as models: `gguf_file` makes an ordinary Hugging
Face folder of one, `gguf_tokenizer` its tokenizer."""

from pathlib import Path

from moray.errors import ConfigError


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


def check_path(model: str, field: str = "target.model") -> None:
    """Refuse a path at which there is no model, without reading or fetching any; what may be a hub name passes.

    Raises:
        ConfigError: naming `field`.
    """
    path = Path(model)
    if path.is_dir():
        problem = "" if (path / "config.json").is_file() else "no config.json there"
    elif path.is_file():
        problem = "" if path.suffix == ".gguf" else "that is a file, but not a GGUF file"
    else:
        is_hub_name = model.count("/") == 1 and path.suffix != ".gguf" and not model.startswith((".", "/", "runs/"))
        problem = "" if is_hub_name else "there is no such file or folder"
    if problem:
        raise ConfigError(f"{field} '{model}': {problem}; give a Hugging Face model folder, a GGUF file or a hub name")
