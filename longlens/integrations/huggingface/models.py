"""Models with any mixer as models of the transformers package: its Auto classes, ``save_pretrained``, ``generate`` and
``Trainer`` work with them. A Trainer has one learning rate for all parameters, unless it is given an optimizer: it does
not know the ``kernel_lr`` and the groups of our recipes.

>>> from longlens.integrations.huggingface import LaSConfig, LaSForCausalLM
>>> config = LaSConfig(vocab_size=27, mixer="s4d", model_options={"depth": 1, "width": 8})
>>> LaSForCausalLM(config)(torch.zeros(2, 5, dtype=torch.int64)).logits.shape
torch.Size([2, 5, 27])
"""

import json
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from longlens.errors import BadInput
from longlens.mixers.registry import Mixer, choose_mixer
from longlens.models.config import ModelConfig
from longlens.models.model import Model, refuse_foresight
from longlens.options import Option, Size
from longlens.tasks.base import Spec

ELSEWHERE = {  # names that other configs of transformers have, and where ours has them
    "hidden_size": "model_options={'width': …}",
    "num_hidden_layers": "model_options={'depth': …}",
    "num_attention_heads": "mixer_options={'heads': …}",
}


class LaSConfig(PreTrainedConfig):
    """All that makes a model again, as plain JSON.

    Args:
        vocab_size: Size of the vocabulary, for inputs that are tokens.
        channels: Number of channels, for inputs that are real numbers; none for tokens.
        max_position_embeddings: Length of the longest sequence.
        shape: Height and width of an image whose rows make the sequence; none for others.
        target_positions: Regression: numbers at the last so many positions; none for one of the whole sequence.
        mixer: Name of the mixer; 'longlens list mixers' has all.
        mixer_options: Options of the mixer; 'longlens list mixers NAME' describes them.
        model_options: Options of ``longlens.models.config.ModelConfig``: depth, width, norm, ...
        scaling: What was done with raw numbers, for the reader; the model takes scaled ones.

    ``num_labels``, ``id2label`` and ``problem_type`` are as in every config of transformers: one label or the type
    "regression" is a model of numbers.
    """

    model_type = "longlens"

    vocab_size: int = 256
    channels: int | None = None
    max_position_embeddings: int = 1024
    shape: list[int] | None = None
    target_positions: int | None = None
    mixer: str = "las"
    mixer_options: dict[str, Any] | None = None
    model_options: dict[str, Any] | None = None
    scaling: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name, place in ELSEWHERE.items():
            if name in kwargs:
                raise BadInput(f"{name} must be given as {place}")
        for name, none in (("vocab_size", False), ("max_position_embeddings", False), ("channels", True)):
            given = getattr(self, name)
            setattr(self, name, None if given is None and none else Option(name, Size).check(given))
        self.mixer_options = _plain(choose_mixer(self.mixer, **(self.mixer_options or {})).options)
        self.model_options = _plain(ModelConfig.make(self.model_options or {}, "model_options").values())
        self.tie_word_embeddings = self.model_options["tied"]
        super().__post_init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        return self.make_model().width

    @property
    def num_hidden_layers(self) -> int:
        return self.make_model().depth

    def make_mixer(self) -> Mixer:
        return choose_mixer(self.mixer, **(self.mixer_options or {}))

    def make_model(self) -> ModelConfig:
        return ModelConfig.make(self.model_options or {}, "model_options")

    def make_spec(self, kind: Literal["classify", "language"]) -> Spec:
        """What the model has to know of its task."""
        if kind == "language":
            if self.channels is not None:
                raise BadInput(f"channels must be none for a language model, which has tokens, got {self.channels}")
            return Spec("tokens", self.vocab_size, self.max_position_embeddings, kind, self.vocab_size, "bits_per_byte")
        inputs = "tokens" if self.channels is None else "real"
        size = self.vocab_size if self.channels is None else self.channels
        shape = None if self.shape is None else (self.shape[0], self.shape[1])
        labels = self.num_labels or 2
        if self.problem_type == "regression" or labels == 1:
            if labels != (self.target_positions or 1):
                wanted = f"{self.target_positions}, as target_positions," if self.target_positions else "1"
                raise BadInput(f"num_labels must be {wanted} for regression, got {labels}")
            where = {"positions": self.target_positions, "shape": shape}
            return Spec(inputs, size, self.max_position_embeddings, "regress", 1, "r2", **where)
        return Spec(inputs, size, self.max_position_embeddings, "classify", labels, "accuracy", shape=shape)


def _plain(values: Any) -> dict[str, Any]:
    """As JSON has it: lists for tuples."""
    return json.loads(json.dumps(dict(values)))


def _tensors(model: Model) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


class _LaSModel(PreTrainedModel):
    """The model of a config, and what both kinds share."""

    config_class = LaSConfig
    config: LaSConfig
    kind: ClassVar[Literal["classify", "language"]]
    _no_split_modules: ClassVar[list[str]] = ["Block"]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: LaSConfig):
        super().__init__(config)
        self.model = self._build()
        if not next(self.model.parameters()).is_meta:
            refuse_foresight(self.model)
            for module in self.modules():  # which transformers would fill with other random numbers
                module._is_hf_initialized = True  # pyright: ignore[reportArgumentType]
        self.post_init()

    def _build(self) -> Model:
        return Model(self.config.make_spec(self.kind), self.config.make_mixer(), self.config.make_model())

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        """``from_pretrained`` makes a model without memory, and leaves what is in no file at random: buffers that are
        not saved, and new heads. All of it is taken from a new model at once."""
        missing = [item for item in _tensors(self.model) if not getattr(item[1], "_is_hf_initialized", False)]
        if not missing:
            return
        with torch.device("cpu"):
            new = dict(_tensors(self._build()))
        for name, tensor in missing:
            tensor.copy_(new[name])
            tensor._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]

    def get_input_embeddings(self) -> Any:
        return self.model.embedding.values

    def set_input_embeddings(self, value: Any) -> None:
        self.model.embedding.values = value

    def _outputs(self, inputs: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """Those of the model. Padding may be on either side of the tokens, and is turned behind them: positions count
        from the first token."""
        real = self.config.channels is not None
        if inputs is None:
            raise BadInput(f"{'input_values' if real else 'input_ids'} must be given: the inputs of this model")
        if real:
            inputs = (inputs.unsqueeze(-1) if inputs.ndim == 2 else inputs).to(self.dtype)
        if attention_mask is None:
            return self.model(inputs)
        if attention_mask.shape != inputs.shape[:2]:
            wanted, got = tuple(inputs.shape[:2]), tuple(attention_mask.shape)
            raise BadInput(f"attention_mask must have the shape (batch, length) = {wanted}, got {got}")
        mask, length = attention_mask.bool(), inputs.shape[1]
        compiling = torch.compiler.is_compiling()  # a program cannot look at the mask
        if not compiling and mask.all():
            return self.model(inputs)
        rows = torch.arange(len(mask), device=mask.device)[:, None]
        places = torch.arange(length, device=mask.device)
        before = mask.int().argmax(dim=1, keepdim=True)  # (B, 1): paddings before the first token
        turned = (places + before) % length  # (B, L): where each token was
        tokens = places < mask.sum(dim=1, keepdim=True)
        if not compiling and not torch.equal(mask[rows, turned], tokens):
            raise BadInput("attention_mask must be 1 for tokens without a gap between them, and 0 before or after them")
        outputs = self.model(inputs[rows, turned], tokens)
        return outputs if self.kind == "classify" else outputs[rows, (places - before) % length]


class LaSForSequenceClassification(_LaSModel):
    """A sequence to scores of classes, (B, labels), or to numbers.

    ``forward(input_ids, attention_mask, labels=labels)``, or for real numbers ``input_values``, (B, L, channels) or,
    for one channel, (B, L). Its attention mask is 1 for tokens and 0 for padding, on either side.
    """

    kind = "classify"

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_values: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        real = self.config.channels is not None
        if (input_ids if real else input_values) is not None:
            wanted, got = ("input_values", "input_ids") if real else ("input_ids", "input_values")
            raise BadInput(f"the inputs of this model must be {wanted}, got {got}")
        logits = self._outputs(input_values if real else input_ids, attention_mask)
        logits = logits.unsqueeze(-1) if logits.ndim == 1 else logits
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits.float(), config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)  # pyright: ignore[reportArgumentType]


class LaSForCausalLM(_LaSModel, GenerationMixin):
    """Tokens to the scores of the next one, (B, L, vocabulary). Labels are the tokens themselves, and are shifted here.

    ``generate`` runs the last ``max_position_embeddings`` tokens again for each new one: it keeps no cache. Rows of
    different lengths may be padded on the left, as transformers does it.
    """

    kind = "language"
    _tied_weights_keys: ClassVar[dict[str, str]] = {  # pyright: ignore[reportIncompatibleVariableOverride]
        "model.head.linear.weight": "model.embedding.values.weight"
    }

    def __init__(self, config: LaSConfig):
        super().__init__(config)
        self.generation_config.use_cache = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> CausalLMOutput:
        logits = self._outputs(input_ids, attention_mask)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
        return CausalLMOutput(loss=loss, logits=logits)  # pyright: ignore[reportArgumentType]

    def get_output_embeddings(self) -> Any:
        return self.model.head.linear

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.model.head.linear = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> dict[str, Tensor | None]:
        window = self.config.max_position_embeddings
        mask = None if attention_mask is None else attention_mask[:, -window:]
        return {"input_ids": input_ids[:, -window:], "attention_mask": mask}


AutoConfig.register(LaSConfig.model_type, LaSConfig, exist_ok=True)
AutoModelForSequenceClassification.register(LaSConfig, LaSForSequenceClassification, exist_ok=True)
AutoModelForCausalLM.register(LaSConfig, LaSForCausalLM, exist_ok=True)
