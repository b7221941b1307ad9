"""Build zero-shot classifiers of `openclip:` URIs: a CLIP image encoder with class prompts as its last layer.

    logits_k = scale * <v(x), w_k>,    w_k = normalized mean over the templates of the text encoder's normalized output

with v(x) the image encoder's normalized output and scale the model's learned temperature. The text encoder runs
once, when the classifier is built, and is not kept. Shapes: B images of C x H x W, K classes, T templates, D features.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..config.register import CLASSIFIERS
from ..config.uris import ClassifierSource, Missing
from ..errors import BaseClassifierError, InvalidInputError, MissingExtra
from .base_classifiers import Normalized
from .checkpoints import import_quietly
from .model_libraries import downloads, missing_checkpoint, missing_hub_files, no_model

TEMPLATE = "a photo of a {}."
_HUB = "hf-hub:"
_HUB_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")  # in open_clip's order
_PROMPTS_AT_ONCE = 256


def missing_weights(uri: ClassifierSource) -> Iterator[Missing]:
    """List the missing files of `openclip:` URIs."""
    classes, tag = uri.option("classes"), uri.option("pretrained")
    if classes and classes != "imagenet" and not Path(classes).is_file():
        yield Missing("file of class names", str(Path(classes).absolute()), "write one name per line, in label order")
    if uri.option("weights"):
        return
    if uri.target.startswith(_HUB):
        yield from missing_hub_files(uri.target.removeprefix(_HUB), ("open_clip_config.json",), _HUB_WEIGHTS)
    elif tag and not Path(tag).is_file():
        config = _library().get_pretrained_cfg(uri.target, tag)
        repository, _, name = config.get("hf_hub", "").rpartition("/")
        if repository:
            yield from missing_hub_files(repository, (*_HUB_WEIGHTS, name) if name else _HUB_WEIGHTS)
        elif config.get("url"):
            yield from missing_checkpoint(config["url"], f"openclip:{uri.target}", Path("~/.cache/clip").expanduser())


@CLASSIFIERS("openclip", describes="a CLIP image encoder with class prompts as its last layer", order=6,
             forms=("openclip:MODEL?pretrained=...&classes=FILE", "openclip:hf-hub:ORG/NAME?classes=FILE"),
             target="text",
             options={"classes": "text", "template": "text", "pretrained": "text", "weights": "none", "seed": "number"},
             random_weights=True, missing="missing_weights")  # fmt: skip
def load_openclip(uri: ClassifierSource) -> Normalized:
    """Build the zero-shot classifier of a model of open_clip, or of the Hugging Face hub in its format.

    Raises:
        MissingExtra: if open_clip is not installed.
        BaseClassifierError: for an unknown model, weights that are not available, or unusable classes or templates.
    """
    library, is_random, on_hub = _library(), bool(uri.option("weights")), uri.target.startswith(_HUB)
    names, templates = _class_names(uri), _templates(uri)
    if not on_hub and uri.target not in library.list_models():
        raise no_model("open_clip", uri.target, library.list_models())
    tag = None if is_random else uri.option("pretrained")
    if not on_hub and not is_random:
        tags = library.list_pretrained_tags_by_model(uri.target)
        if tag is None or (tag not in tags and not Path(tag).is_file()):
            given = "pretrained is missing" if tag is None else f"pretrained={tag!r} is neither a file nor a tag of it"
            raise BaseClassifierError(f"openclip:{uri.target}: {given}; it has: {', '.join(tags) or 'none'}")
    with downloads():
        # open_clip only warns if weights were trained with QuickGELU, as OpenAI's were, and the architecture has GELU.
        quick = bool(tag and (library.get_pretrained_cfg(uri.target, tag) or {}).get("quick_gelu"))
        model = library.create_model(uri.target, pretrained=tag, force_quick_gelu=quick).eval()
        tokenizer = library.get_tokenizer(uri.target)
    at_once = max(_PROMPTS_AT_ONCE // len(templates), 1)
    prompts = [(lambda name, text=text: text.replace("{}", name)) for text in templates]
    heads_DK = library.build_zero_shot_classifier(model, tokenizer, names, prompts, num_classes_per_batch=at_once)
    classifier = ZeroShot(model.visual, heads_DK.T.contiguous(), model.logit_scale.detach().exp())
    mean, std = getattr(model.visual, "image_mean", None), getattr(model.visual, "image_std", None)
    return Normalized(classifier, mean or library.OPENAI_DATASET_MEAN, std or library.OPENAI_DATASET_STD)


class ZeroShot(nn.Module):
    """Compute logits (B, K) from normalized images (B, C, H, W)."""

    heads: Tensor
    scale: Tensor

    def __init__(self, visual: Any, heads_KD: Tensor, scale: Tensor) -> None:
        super().__init__()
        size = getattr(visual, "image_size", 224)
        self.image_size = (size, size) if isinstance(size, int) else tuple(size)
        self.visual = visual
        self.register_buffer("heads", heads_KD)
        self.register_buffer("scale", scale)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits of shape (B, K). Raises InvalidInputError for images of another size than the encoder's."""
        if tuple(images_BCHW.shape[-2:]) != self.image_size:
            height, width = self.image_size
            raise InvalidInputError(
                f"the CLIP encoder takes images of {height} x {width}, not {images_BCHW.shape[-2]} x "
                f"{images_BCHW.shape[-1]}: give the data set ?preprocess=BicubicRes{height}Crop{width}"
            )
        features_BD = nn.functional.normalize(self.visual(images_BCHW), dim=-1)
        logits_BK: Tensor = self.scale * features_BD @ self.heads.T
        return logits_BK


def _library() -> Any:
    try:
        return import_quietly("open_clip")
    except ImportError as error:
        raise MissingExtra("openclip", str(error.name), "clip") from error


def _class_names(uri: ClassifierSource) -> list[str]:
    path = uri.option("classes")
    if path is None:
        raise BaseClassifierError(
            "openclip: needs classes=FILE, with one class name per line in the order of the labels, or classes=imagenet"
        )
    return list(_library().IMAGENET_CLASSNAMES) if path == "imagenet" else _lines(path)


def _templates(uri: ClassifierSource) -> list[str]:
    given = uri.option("template") or TEMPLATE
    templates = _lines(given) if given.endswith(".txt") else [given]
    for template in templates or [""]:
        if "{}" not in template:
            raise BaseClassifierError(f"template {template!r} has no {{}} where the class goes")
    return templates


def _lines(path: str) -> list[str]:
    return [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
