"""`openclip:` URIs: a CLIP image encoder as a zero-shot classifier."""

import json
import sys
from pathlib import Path

import pytest
import torch

from mixednuts_dist.classifiers.base_classifiers import check_classifier, classifier_checksum, load_classifier
from mixednuts_dist.config.uris import ClassifierSource
from mixednuts_dist.errors import BaseClassifierError, InvalidInputError, MissingExtra

open_clip = pytest.importorskip("open_clip")

TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of three classes; the architecture `tiny-clip` is known to open_clip."""
    folder = tmp_path_factory.mktemp("clip")
    (folder / "tiny-clip.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(folder)
    (folder / "classes.txt").write_text("cat\ndog\npolar bear\n")
    return folder / "classes.txt"


def test_its_logits_are_the_scaled_cosines_of_images_and_prompts(classes: Path) -> None:
    uri = f"openclip:tiny-clip?weights=none&seed=3&classes={classes}&template=a drawing of a {{}}"
    model = load_classifier(uri, "rob")
    x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        clip = open_clip.create_model("tiny-clip").eval()
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD))
    prompts = open_clip.get_tokenizer("tiny-clip")([f"a drawing of a {name}" for name in ("cat", "dog", "polar bear")])
    with torch.no_grad():
        expected, _ = clip.get_logits((x - mean) / std, prompts)
        assert torch.allclose(model(x), expected, atol=1e-4)
    assert check_classifier(model, x, "rob") == 3
    model(x.requires_grad_())[:, 1].sum().backward()
    assert x.grad is not None and float(x.grad.abs().min(dim=0).values.max()) > 0
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert classifier_checksum(model, uri) == classifier_checksum(load_classifier(uri, "rob"), uri)
    with pytest.raises(InvalidInputError, match=r"32 x 32, not 64 x 64.*preprocess=BicubicRes32Crop32"):
        model(torch.rand(1, 3, 64, 64))


def test_several_templates_are_averaged(classes: Path) -> None:
    templates = classes.with_name("templates.txt")
    templates.write_text("a photo of a {}.\na painting of a {}.\n")
    uri = f"openclip:tiny-clip?weights=none&classes={classes}&template="
    both, one = load_classifier(f"{uri}{templates}", "rob"), load_classifier(f"{uri}a photo of a {{}}.", "rob")
    assert torch.allclose(both.net.heads.norm(dim=1), torch.ones(3))  # type: ignore[union-attr]
    assert not torch.allclose(both.net.heads, one.net.heads)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("openclip:tiny-clip?weights=none", "needs classes=FILE"),
        ("openclip:tiny-clip?weights=none&classes=CLASSES&template=a photo", "has no {} where the class goes"),
        ("openclip:tiny-clip?classes=CLASSES", "pretrained is missing; it has: none"),
        ("openclip:ViT-B-32?pretrained=openia&classes=CLASSES", "nor a tag of it; it has: openai, laion"),
        ("openclip:ViT-B-31?weights=none&classes=CLASSES", "open_clip has no model 'ViT-B-31'"),
        ("openclip:tiny-clip?weights=none&classes=gone.txt", "FileNotFoundError: .*gone.txt"),
    ],
)
def test_what_cannot_be_built_is_told(classes: Path, uri: str, told: str) -> None:
    with pytest.raises(BaseClassifierError, match=told.replace("{", r"\{")):
        load_classifier(uri.replace("CLASSES", str(classes)), "rob")


def test_check_names_the_weights_of_the_hub_that_are_not_here(
    classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    uri = f"openclip:hf-hub:chs20/fare4-clip?classes={classes}"
    lacking = [item.what for item in ClassifierSource(uri).missing("rob")]
    assert lacking == [
        "open_clip_config.json of the hub's chs20/fare4-clip",
        "open_clip_model.safetensors of the hub's chs20/fare4-clip",
    ]
    assert ClassifierSource(uri).without_weights() is not None


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(MissingExtra, match=r"openclip needs open_clip\. Run in the clone: pip install '\.\[clip\]'"):
        load_classifier("openclip:ViT-B-32?weights=none&classes=cat,dog")
