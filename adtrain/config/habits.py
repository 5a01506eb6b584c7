"""Names that Keras, PyTorch, Lightning and scikit-learn use, and what a config of adtrain has instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from adtrain.config import schema
from adtrain.config.problems import PathParts, similar
from adtrain.config.source import Node

RATE = "optimizer.NAME.lr"
NORM, VALUE = "training.clip_norm", "training.clip_value"

T = TypeVar("T")


def _by_name(rows: Mapping[str, T]) -> dict[str, T]:
    """The meaning of each name. A key of `rows` has several names with blanks between them."""
    return {name: meaning for names, meaning in rows.items() for name in names.split()}


KEYS = _by_name(
    {
        "learning_rate base_lr": RATE,
        "max_epochs num_epochs n_epochs max_iter": "training.epochs",
        "max_steps num_steps": "training.steps",
        "grad_clip gradient_clip clip_grad clip_grad_norm gradient_clip_val": NORM,
        "gradient_clipping gradient_clip_norm": NORM,
        "max_grad_norm max_norm clipnorm global_clipnorm": NORM,
        "clip_grad_value clipvalue": VALUE,
        "accumulate_grad_batches gradient_accumulation_steps accumulation_steps": "training.micro_batch",
        "random_state random_seed manual_seed": "training.seed",
        "dtype amp mixed_precision": "training.precision",
        "batch train_batch_size": "data.batch_size",
        "validation_split val_split val_size validation_fraction": "data.validation",
        "test_split test_size": "data.test",
        "augmentation augmentations transforms": "data.augment",
        "eval evaluation tta test_time_augmentation": "data.views",
        "block_size seq_len seq_length sequence_length context_length": "data.length",
        "scheduler lr_scheduler": "schedule",
        "param_groups paramwise_cfg": "parameter_groups",
        "criterion loss_fn objective": "loss",
        "network net architecture": "model",
    }
)
"""The config's key for a key of another system."""

OPTIONS: dict[str, tuple[str, ...]] = _by_name(
    {
        "units out_dim output_dim hidden_size": ("out_features", "hidden_size", "embedding_dim"),
        "filters out_planes": ("out_channels",),
        "rate prob": ("p",),
        "degrees angle": ("rotation",),
        "translate": ("shift",),
        "hidden_dim hidden_units cell_size": ("hidden_size",),
        "vocab_size input_dim num_tokens": ("num_embeddings",),
        "intermediate_dim ff_dim ffn_dim mlp_dim d_ff": ("dim_feedforward",),
        "use_causal_mask": ("causal",),
        "n_head n_heads heads num_attention_heads": ("num_heads", "nhead"),
        "n_kv_heads num_kv_heads kv_heads n_kv_head": ("num_key_value_heads",),
        "rope_theta rope_base rope rotary": ("rotary_base",),
        "sliding_window window_size": ("window",),
        "softcap logit_softcap attn_logit_softcapping": ("soft_cap",),
        "intermediate_size n_inner ffn_hidden": ("dim_feedforward",),
        "tie_weights tie_word_embeddings weight_tying": ("tied",),
        "activation": ("nonlinearity",),
        "use_bias": ("bias",),
        "strides": ("stride",),
        "kernel pool_size": ("kernel_size",),
        "learning_rate": ("lr",),
        "beta_1": ("betas",),
        "epsilon": ("eps",),
    }
)
"""The option of a layer or optimizer for an option of another system: the first one that it has."""

NAMES = _by_name(
    {
        "dense fc fully_connected affine": "linear",
        "conv convolution convolution2d": "conv2d",
        "maxpool maxpooling2d": "max_pool2d",
        "avgpool averagepooling2d": "avg_pool2d",
        "globalaveragepooling2d global_avg_pool": "adaptive_avg_pool2d",
        "globalaveragepooling1d": "mean",
        "simplernn": "rnn",
        "rmsnorm rms": "rms_norm",
        "relu2 relu_squared sqrelu": "squared_relu",
        "cls_token cls": "class_token",
        "block transformer_block gpt_block transformer_decoder_layer": "decoder_layer",
        "patch_embedding patchembed patchify": "patches",
        "batchnorm batchnormalization": "batch_norm2d",
        "ce categorical_crossentropy sparse_categorical_crossentropy": "cross_entropy",
        "bce binary_crossentropy bcewithlogitsloss": "binary_cross_entropy_with_logits",
        "mean_squared_error mseloss": "mse",
        "mean_absolute_error mae l1loss": "l1",
        "cosineannealinglr": "cosine",
        "cosineannealingwarmrestarts": "cosine_restarts",
        "linear linear_decay linearlr polynomiallr": "polynomial",
        "cyclic cycliclr": "triangular",
        "wsd warmup_stable_decay": "trapezoid",
        "reducelronplateau reduce_on_plateau": "plateau",
        "steplr": "step",
        "randomhorizontalflip horizontal_flip hflip": "flip",
        "randomverticalflip vflip": "vertical_flip",
        "randomcrop random_crop": "crop",
        "randomaffine randomrotation rotation": "affine",
        "randomerasing random_erasing": "cutout",
        "randomresizedcrop": "random_resized_crop",
        "colorjitter": "color_jitter",
    }
)
"""The name of a layer, loss, schedule or augmentation for a name of another system."""

COMMAND = "the command line has it: --device gpu"
GATES = "gates have a sigmoid, states tanh; remove it"
WEIGHTS = "examples have no weights; classes have, such as loss: {cross_entropy: {weight: balanced}}"
READING = "the data set is in memory, or read as needed; remove it"
SENTENCES = _by_name(
    {
        "device devices accelerator cuda gpu gpus": COMMAND,
        "num_workers workers pin_memory prefetch_factor": READING,
        "data.weight data.weights sample_weight sample_weights class_weight class_weights": WEIGHTS,
        "batch_first": "the batch is always the first axis; remove it",
        "shuffle": "the images of each epoch are always in a new random order; remove it",
        "activation": "write the activation as the next layer, such as relu",
        "lstm.activation gru.activation recurrent_activation": GATES,
        "return_sequences": "write output: all for the states of all steps, and nothing for the last one",
        "key_dim value_dim head_dim": "the width of a head follows; remove it",
        "input_shape input_dim": "model.input has it, and the inputs of other layers follow",
    }
)
"""What to do about a key, or a key of one layer, that a config does not need."""

WRAPPERS = {
    "bidirectional": "write bidirectional: true in rnn, lstm or gru",
    "timedistributed": "linear layers and activations take each step by itself; leave it out",
}
"""What to write instead of a layer of Keras that has another one inside."""

NAME_KEYS = ("type", "name", "kind", "class_name", "_target_")
"""Keys whose value is the name of a class in the configs of other systems."""

EXAMPLES = {
    "data": "{dataset: mnist, batch_size: 128}",
    "model": "{input: [784], layers: [{linear: 10}]}",
    "training": "{epochs: 5}",
    "training.early_stopping": "{patience: 5}",
}
"""A short section, by its dotted key."""


def key_of(name: str, root: Node | None = None) -> str | None:
    """The dotted key of a config for a key that another system has, or that another section has; None if unknown."""
    if name in KEYS:
        key = KEYS[name]
        return key.replace("NAME", _optimizer(root)) if "NAME" in key else key
    if name in schema.keys_of():
        return name
    sections = "data", "model", "training"
    return next((f"{section}.{name}" for section in sections if name in schema.keys_of(section)), None)


def option_of_optimizer(name: str, root: Node | None = None) -> str | None:
    """The dotted key of an option of the config's optimizer; None if it has no such option."""
    optimizer = _optimizer(root)
    return f"optimizer.{optimizer}.{name}" if name in (schema.options_of(optimizer) or ()) else None


def of_key(path: PathParts, root: Node, names: Sequence[str]) -> str | None:
    """A hint for the unknown key at `path`, where `names` are known; None without one."""
    name = str(path[-1]).lower()
    if option := next((option for option in OPTIONS.get(name, ()) if option in names), None):
        return f"did you mean {option}?"
    if sentence := SENTENCES.get(f"{path[-2]}.{name}" if len(path) > 1 else "") or SENTENCES.get(name):
        return sentence
    in_section = len(path) <= 2
    if in_section and (key := key_of(name, root)):
        return f"did you mean {key}{' at the top level' if '.' not in key and len(path) > 1 else ''}?"
    if misspelt := similar(name, names, 0.8):
        return misspelt
    if in_section and (key := option_of_optimizer(name, root)):
        return f"did you mean {key}?"
    return similar(name, names)


def of_name(name: str, names: Sequence[str]) -> str | None:
    """A hint for the unknown name of a layer, loss, schedule or augmentation; None without one."""
    word, space, option = name.partition(" ")
    if space and word in names:
        return f"did you mean {word}: {option.strip()}?"
    meant = NAMES.get(name.lower())
    return f"did you mean {meant}?" if meant in names else WRAPPERS.get(name.lower())


def of_class(value: object, names: Sequence[str]) -> str | None:
    """A hint for a name of `names` that is a value, such as `{type: adam, lr: 0.1}`; None without one."""
    if not isinstance(value, dict):
        return None
    key = next((key for key in NAME_KEYS if value.get(key) in names), None)
    if key is None:
        return None
    options = ", ".join(f"{name}: ..." for name in value if name != key)
    return f"the name is the key: write {f'{{{value[key]}: {{{options}}}}}' if options else value[key]}"


def _optimizer(root: Node | None) -> str:
    """The name of the config's optimizer, adam if it has none."""
    value = None if root is None else root.find(("optimizer",))[0].value
    name = next(iter(value), "") if isinstance(value, dict) else value
    return name if isinstance(name, str) and schema.options_of(name) is not None else "adam"
