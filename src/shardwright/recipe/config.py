"""Every key of a recipe: its type, its default, its limits and what it means.

A recipe is one TOML file with these sections. Values come from, in rising order: the defaults below, the
file, the command line (``--training.steps 50``). There is no hidden file, and no environment variable changes
a value. How the three are merged and checked is in :mod:`shardwright.recipe.resolve`.
"""

from typing import Annotated, Any, Literal

from shardwright.extras import from_extra
from shardwright.policy import Lora, Offload, SchedulePolicy, WatchPolicy
from shardwright.recipe.section import Seconds, Section, keys_of

with from_extra("train"):
    from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

_RESUME = WithJsonSchema({"type": ["string", "integer"], "pattern": "^(auto|last|[0-9]*)$", "minimum": 0})


def _resume(value: object) -> object:
    text = str(value)
    if text not in ("", "auto", "last") and not text.isdecimal():
        raise ValueError('expected "auto", "last", or the step of a checkpoint')
    return text


def _function(value: str) -> str:
    module, _, name = value.partition(":")
    if value and not (name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError("expected module:function, as mine:build")
    return value


def _loss(value: str) -> str:
    if value in ("cross-entropy", "dpo"):
        return value
    if ":" not in value:
        raise ValueError("expected cross-entropy, dpo, or module:function")
    return _function(value)


def _transport(value: object) -> object:
    if value == "gloo":
        raise ValueError(
            'Gloo\'s own messages were removed; take "auto" or "sockets", or "collectives" for torch\'s '
            "collectives (over Gloo they sum in another order and send up to twice the bytes)"
        )
    return value


class RunConfig(Section):
    """Where the run keeps its files, its seed, and whether it goes on."""

    folder: str = Field(default="", description="the run's folder; empty: runs/<name of the recipe>")
    seed: int = Field(
        default=0, ge=0, description="seed of the random numbers: initial weights, order of the data, dropout"
    )
    resume: Annotated[str, BeforeValidator(_resume), _RESUME] = Field(
        default="",
        description="auto: go on where there is a checkpoint, else begin; last: there must be one; or the "
        "step of one; empty: begin a new run, or auto where a launcher has started the job again",
    )


_Listed = Field(strict=False)  # TOML has lists in place of tuples
Names = Annotated[tuple[str, ...], _Listed]


class SourceConfig(Section):
    """One of several sources of data; what is not given is as [data] says."""

    path: str = Field(description="as data.path")
    weight: float = Field(
        default=0.0,
        ge=0.0,
        description="its share of the sequences beside the other weights; given to all sources or to none: "
        "then as large as the source",
    )
    split: str = Field(default="", description="as data.split")
    subset: str = Field(default="", description="as data.subset")


class DataConfig(Section):
    """The corpus: read as bytes, or in tokens for a model of [base]."""

    path: str = Field(
        default="stdlib",
        description="a file or a folder of text, or its URL (s3://bucket/text; copied to each host once); "
        "'stdlib', 'torch': the source of Python's standard library, of PyTorch; with [base] also records: "
        "JSONL, JSON, Parquet, a folder of Hugging Face datasets, or the name of a data set on its Hub",
    )
    sources: Annotated[tuple[SourceConfig, ...], _Listed] = Field(
        default=(), description="instead of path, several: [{path = 'a.jsonl', weight = 3.0}, ...]"
    )
    split: str = Field(
        default="train", description="of a data set, or of a folder whose files are named by their splits"
    )
    subset: str = Field(default="", description="of a data set on the Hub that has several")
    columns: dict[str, str] = Field(
        default={}, description="names of your fields: {prompt = 'question', completion = 'answer'}"
    )
    on_bad: Literal["error", "skip"] = Field(
        default="error", description="what to do about a record that can't be used; skip: count them"
    )
    cache: str = Field(
        default="",
        description="folder for tokenised data, on a disk of each host; empty: ~/.cache/shardwright",
    )
    suffixes: Names = Field(
        default=(), description="files of the folder to take, as ['.py', '.txt']; empty: all that are text"
    )
    limit_nbytes: int = Field(
        default=0,
        ge=0,
        description="bytes to take at most, in whole files, the same ones in every run; 0: all",
    )
    heldout_share: float = Field(
        default=0.05,
        gt=0.0,
        lt=1.0,
        description="share of the bytes held out, by whole files or records (one file of text: its end)",
    )
    mask_prompts: bool = Field(
        default=True, description="of records, learn completions and the assistant's messages only"
    )
    packing: bool = Field(
        default=True,
        description="several records in one sequence, none of which sees another, where the model keeps them "
        "apart and one step's sequences can be filled so; off: one each",
    )
    pad_token: str = Field(default="", description="for padding; empty: the tokenizer's own, or any")

    @model_validator(mode="after")
    def _sources_fit(self) -> "DataConfig":
        weights = [source.weight for source in self.sources]
        if any(weights) and not all(weights):
            raise ValueError(f"weights {weights} of the sources: give each of them one above 0, or none")
        if self.sources and self.path != type(self).model_fields["path"].default:
            raise ValueError("path and sources: give one of the two")
        return self

    def each(self) -> "list[DataConfig]":
        """The sources one by one, each as a corpus of its own."""
        own = [source.model_dump(exclude={"weight"}) for source in self.sources]
        given = [{key: value for key, value in source.items() if value} for source in own]
        return [self.model_copy(update={"sources": (), **source}) for source in given] or [self]


class BaseConfig(Section):
    """The model to fine-tune; without a folder, the model of [model] is trained from scratch."""

    folder: str = Field(default="", description="of a model as transformers saves it, with its tokenizer")
    quantise: Literal["none", "nf4", "nf4-double", "int8"] = Field(
        default="none", description="how the frozen base's matrices are encoded; needs adapter.rank"
    )
    dequantise: Literal["group", "layer"] = Field(
        default="group",
        description="when encoded weights are decoded: with their group, or (less memory, more time) each "
        "where it is used",
    )
    dtype: Literal["files", "fp32", "bf16"] = Field(
        default="files", description="of the base's shards; files: as its config.json says"
    )
    build: Annotated[str, AfterValidator(_function)] = Field(
        default="",
        description="module:function that makes the model instead of transformers: given the folder and a "
        "dtype or None, on the meta device",
    )


class AdapterConfig(keys_of(Lora, targets=Literal["auto"] | Names)):
    """LoRA adapters on the model of [base], which is then frozen."""

    rank: int = Field(default=0, ge=0, description="columns of A and B; 0: no adapters, all is trained")


class ModelConfig(Section):
    """Sizes of the decoder-only transformer; its vocabulary is the 256 bytes."""

    num_layers: int = Field(default=7, ge=1, description="blocks")
    dim: int = Field(default=256, ge=2, description="width of the residual stream")
    num_heads: int = Field(
        default=4, ge=1, description="attention heads; divides dim, and dim / num_heads is even"
    )
    hidden_dim: int = Field(default=704, ge=1, description="inner width of the SwiGLU feed-forward")
    tied_embedding: bool = Field(default=False, description="the output head is the embedding's weight")
    dropout: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="on what each block adds to the residual stream"
    )
    rope_theta: float = Field(
        default=10000.0, gt=0.0, description="base of the rotary embedding's wavelengths"
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> "ModelConfig":
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ValueError(
                f"dim = {self.dim} in num_heads = {self.num_heads} heads: expected equal, even "
                "widths; set dim to a multiple of 2 * num_heads"
            )
        return self


class TrainingConfig(Section):
    """The loop. global batch = ranks x batch_size x accumulation."""

    steps: int = Field(default=400, ge=1, description="optimizer steps")
    epochs: int = Field(
        default=0, ge=0, description="instead of steps: times over the data; a checkpoint after each"
    )
    batch_size: int = Field(default=4, ge=1, description="sequences per rank and microbatch")
    accumulation: int = Field(default=1, ge=1, description="microbatches per optimizer step")
    sequence_length: int = Field(default=256, ge=1, description="bytes, or tokens, per sequence")
    loss: Annotated[str, AfterValidator(_loss)] = Field(
        default="cross-entropy",
        description="cross-entropy; dpo, of preferences (chosen, rejected), with the base as its reference; "
        "or module:function, given logits and targets (-100: not learned), which returns a sum",
    )
    dpo_beta: float = Field(
        default=0.1, gt=0.0, description="of dpo: larger keeps the model closer to its base"
    )
    dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="of the unsharded weights and activations; shards and sums stay in fp32"
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="recompute each block's activations in the backward instead of keeping them",
    )
    offload_activations: bool = Field(
        default=False,
        description="with activation_checkpointing: what blocks were given lies on the host until the "
        "backward; on CPU ranks it is there anyway",
    )
    offload: Offload = Field(
        default="none",
        description="what is on the host between uses: nothing, the optimizer's state and step, or "
        "parameters and gradients as well; on CPU ranks all is there anyway",
    )
    plan: str = Field(
        default="",
        description="file of a plan for a model of [model]: groups, dtypes, copies of shards, schedule and "
        "recomputation; empty: a group per block",
    )
    log_every: int = Field(default=10, ge=1, description="steps between two logged ones")
    on_nonfinite: Literal["stop", "skip", "go on"] = Field(
        default="stop",
        description="where the gradients of a step are infinite or NaN: stop, with the checkpoints before "
        "it; skip the step, which waits for the device in each; or don't look",
    )


class OptimizerConfig(Section):
    """AdamW or Muon, with a linear warm-up of the learning rate and a schedule."""

    kind: Literal["adamw-fused", "adamw", "adamw-8bit", "muon"] = Field(
        default="adamw-fused",
        description="adamw-fused: one kernel for many tensors; adamw: without it; adamw-8bit: bitsandbytes', "
        "whose state takes 2 bytes a parameter instead of 8; muon: for matrices but embeddings and the head, "
        "scaled for AdamW's lr, and adamw for the rest",
    )
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        default="cosine",
        description="after the warm-up: a cosine down to the end; wsd (warm-up, stable, decay): the peak, "
        "and a line down over the last steps; or the peak",
    )
    lr: float = Field(default=1e-3, gt=0.0, description="peak learning rate")
    warmup_steps: int = Field(default=20, ge=0, description="steps of the linear warm-up")
    decay_share: float = Field(
        default=0.2, gt=0.0, le=1.0, description="share of the steps in which wsd goes down"
    )
    final_share: float = Field(
        default=0.1, ge=0.0, le=1.0, description="last learning rate as a share of the peak"
    )
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0, description="decay of the gradient's mean")
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0, description="decay of the gradient's square")
    weight_decay: float = Field(default=0.1, ge=0.0, description="of matrices; vectors are not decayed")
    clip_norm: float = Field(
        default=1.0, gt=0.0, allow_inf_nan=True, description="largest norm of the whole gradient"
    )


class HeldoutConfig(Section):
    """Evaluation on the held-out files; always done once more after the last step."""

    every: int = Field(default=100, ge=1, description="steps between two evaluations")
    at_start: bool = Field(default=False, description="evaluate before the first step, too")
    num_windows: int = Field(default=64, ge=1, description="sequences, spread evenly over the held-out bytes")
    keep_best: bool = Field(
        default=False,
        description="keep a checkpoint of the lowest held-out loss in <folder>/best; at the end its model is "
        "the one that is exported",
    )
    patience: int = Field(
        default=0, ge=0, description="end after so many evaluations in a row without a lower loss; 0: never"
    )


class CheckpointConfig(Section):
    """Resumable sharded checkpoints; one is always written at the end.

    A fine-tuned model, or its adapters, is in <folder>/exported as well, after each epoch and at the end.
    """

    folder: str = Field(
        default="",
        description="where they are: a folder, or a URL as s3://bucket/run, to which they are uploaded while "
        "training goes on; empty: <folder>/checkpoint",
    )
    every: int = Field(default=200, ge=1, description="steps between two checkpoints")
    keep: int = Field(default=2, ge=1, description="checkpoints kept; older ones are removed")


_RANKS = WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 0}]})


class LaunchConfig(Section):
    """Ranks that the command starts itself; under torchrun it takes the ranks that it is given."""

    ranks: Annotated[
        int, BeforeValidator(lambda value: 0 if value == "auto" else value), Field(ge=0), _RANKS
    ] = Field(
        default=0,
        description="local ranks to start (not read under torchrun); 0 or auto: one per visible accelerator, "
        "2 where there is none",
    )
    ranks_per_core: int = Field(default=8, ge=1, description="more local ranks for each core are refused")
    backend: Literal["eager", "xla"] = Field(
        default="eager",
        description="eager: a process per rank; xla: one compiled program, a device per rank",
    )
    device: Literal["auto", "cpu", "cuda", "xpu", "hpu", "mps"] = Field(
        default="auto",
        description="auto: the accelerator that is visible, one device per local rank; the CPU where there "
        "is none",
    )
    timeout_s: Seconds = Field(
        default=120.0, gt=0.0, description="longest wait for other ranks before it is an error"
    )


class MeshConfig(Section):
    """What ranks share besides parameters: ranks = pp x replicate x dp x cp x tp (``shardwright.mesh``)."""

    dp: int = Field(
        default=0,
        ge=0,
        description="ranks that read different sequences and share parameters; 0: what the others leave",
    )
    replicate: int = Field(
        default=1, ge=1, description="copies of all shards; their ranks read different sequences too"
    )
    tp: int = Field(
        default=1, ge=1, description="ranks that share each layer of a model of [base], by its own plan"
    )
    cp: int = Field(
        default=1,
        ge=1,
        description="ranks that share each sequence; divides the heads and training.sequence_length",
    )
    ep: int = Field(
        default=1,
        ge=1,
        description="of the ranks of dp and cp, those that share the experts of a model of [base]",
    )
    pp: int = Field(
        default=1, ge=1, description="stages of a pipeline, which share the layers by their order"
    )
    pp_schedule: Literal["1F1B", "GPipe"] = Field(
        default="1F1B",
        description="order in which stages compute the training.accumulation microbatches of a step",
    )

    def sizes(self) -> dict[str, Any]:
        """The arguments of ``shardwright.mesh``."""
        return self.model_dump(exclude={"pp_schedule"}) | {"dp": self.dp or -1}


class ScheduleConfig(keys_of(SchedulePolicy)):
    """When collectives are issued: see ``SchedulePolicy``. It changes times and memory, never a number."""

    transport: Annotated[Literal["auto", "sockets", "collectives"], BeforeValidator(_transport)] = Field(
        default="auto", description="how bytes move; auto: shared memory between CPU ranks of one host"
    )


class WatchConfig(keys_of(WatchPolicy)):
    """When a rank that waits asks the others what they do: see ``WatchPolicy``."""


class TrackConfig(Section):
    """Where the rows of metrics.jsonl go besides; each needs its library (shardwright[track])."""

    to: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...], _Listed] = Field(
        default=(), description="any of tensorboard, wandb, mlflow, trackio"
    )
    project: str = Field(default="shardwright", description="what they file the run under")
    peak_tflops: float = Field(
        default=0.0,
        ge=0.0,
        description="of one device, for the MFU; 0: of its data sheet, where the planner knows it",
    )


class SampleConfig(Section):
    """The text that the model writes at the end."""

    num_bytes: int = Field(default=200, ge=1, description="bytes to write; with [base]: tokens")
    temperature: float = Field(default=0.7, ge=0.0, description="0: always the likeliest byte")
    prompt: str = Field(default="", description="text to continue; empty: the start of a file")


class Recipe(Section):
    """One training run, complete."""

    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    base: BaseConfig = BaseConfig()
    adapter: AdapterConfig = AdapterConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    heldout: HeldoutConfig = HeldoutConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    launch: LaunchConfig = LaunchConfig()
    mesh: MeshConfig = MeshConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    watch: WatchConfig = WatchConfig()
    track: TrackConfig = TrackConfig()
    sample: SampleConfig = SampleConfig()

    @model_validator(mode="after")
    def _sections_fit(self) -> "Recipe":
        wrong = []
        if self.base.folder:
            if self.model != ModelConfig():
                wrong.append("model: [base] names a model, which has its own sizes; leave [model] out")
            if self.base.quantise != "none" and not self.adapter.rank:
                wrong.append("base.quantise: an encoded base is frozen; set adapter.rank, to 8 for example")
            if self.launch.backend != "eager":
                wrong.append('launch.backend: a model of [base] trains on "eager" only; set it to that')
            if self.training.loss == "dpo" and not self.adapter.rank:
                wrong.append(
                    "training.loss: the reference of dpo is the base without its adapters; set adapter.rank"
                )
        elif self.training.loss != "cross-entropy":
            wrong.append("training.loss: the model of [model] learns by cross-entropy; leave it out")
        elif self.adapter.rank or self.base.quantise != "none":
            wrong.append("adapter, base.quantise: they are for a model of [base]; set base.folder")
        if self.training.offload_activations and not (
            self.training.activation_checkpointing and self.launch.backend == "eager"
        ):
            wrong.append(
                'training.offload_activations: inputs of recomputed blocks move, on "eager"; set '
                "training.activation_checkpointing = true"
            )
        if self.training.offload != "none" and self.launch.backend != "eager":
            wrong.append('training.offload: shards lie on the host on "eager" only; leave it out')
        if self.training.on_nonfinite == "skip" and self.launch.backend != "eager":
            wrong.append('training.on_nonfinite: a step is skipped on "eager" only; set it to "stop"')
        kind = self.optimizer.kind
        if kind in ("adamw-8bit", "muon") and self.launch.backend != "eager":
            wrong.append(f'optimizer.kind: {kind} steps on "eager" only; take another one')
        if kind == "muon" and self.adapter.rank:
            wrong.append("optimizer.kind: muon is for weights, which [adapter] freezes; take another one")
        if self.data.sources and not self.base.folder:
            wrong.append("data.sources: they are for a model of [base]; give data.path")
        if self.training.plan:
            if self.base.folder or self.launch.backend != "eager":
                wrong.append('training.plan: it is for a model of [model] on "eager"; leave it out')
            if self.training.activation_checkpointing:
                wrong.append(
                    "training.activation_checkpointing: the plan says what is recomputed; leave it out"
                )
            if self.training.offload != "none":
                wrong.append("training.offload: the plan says what is offloaded; leave it out")
            if self.schedule != ScheduleConfig(transport=self.schedule.transport):
                wrong.append("schedule: the plan has the policy; leave out all of [schedule] but transport")
        wrong += self._unfit_for_mesh()
        if wrong:
            raise ValueError("\n  - ".join(wrong))
        return self

    def _unfit_for_mesh(self) -> list[str]:
        """What can't be trained as [mesh] says, with what to do instead."""
        cp, training, sizes, wrong = self.mesh.cp, self.training, self.mesh.sizes(), list[str]()
        if self.mesh == MeshConfig():
            return wrong
        if self.launch.backend != "eager":
            wrong.append('mesh: ranks share more than parameters on "eager" only; leave [mesh] out')
        if training.plan:
            wrong.append("mesh: a plan says how parameters are shared; leave [mesh] or training.plan out")
        if training.sequence_length % cp:
            wrong.append(
                f"mesh.cp: {cp} ranks can't share training.sequence_length = {training.sequence_length} "
                f"evenly; set it to {-(-training.sequence_length // cp) * cp}"
            )
        if not self.base.folder:
            wrong += [
                f"mesh.{key}: it is for a model of [base]; take dp or cp"
                for key in ("tp", "ep")
                if sizes[key] > 1
            ]
            if self.model.num_heads % cp:
                wrong.append(
                    f"mesh.cp: {cp} ranks can't share model.num_heads = {self.model.num_heads}; take a "
                    "divisor of it"
                )
        if cp > 1 and training.loss != "cross-entropy":
            wrong.append(
                f"mesh.cp: training.loss = {training.loss!r} is made of whole sequences; leave cp out"
            )
        if self.base.quantise != "none":
            wrong += [
                f"mesh.{key}: ranks can't share {what} of a base in {self.base.quantise}, whose codes are of "
                f"whole matrices; leave {key} or base.quantise out"
                for key, what in (("tp", "layers"), ("ep", "experts"))
                if sizes[key] > 1
            ]
        if self.mesh.pp > 1:
            wrong += self._unfit_for_stages(self.mesh.pp)
        return wrong

    def _unfit_for_stages(self, pp: int) -> list[str]:
        training, model, wrong = self.training, self.model, list[str]()
        if training.accumulation < pp:
            wrong.append(
                f"mesh.pp: {pp} stages need as many microbatches or more, got training.accumulation = "
                f"{training.accumulation}; set it to {pp}, and training.batch_size to less"
            )
        if self.adapter.rank:
            wrong.append("mesh.pp: stages train all of a model; leave adapter.rank or pp out")
        if self.mesh.ep > 1:
            wrong.append(
                f"mesh.pp: stages share no experts, got mesh.ep = {self.mesh.ep}; take one of the two"
            )
        if not self.base.folder and (model.num_layers < pp or model.tied_embedding):
            wrong.append(
                f"mesh.pp: {pp} stages need a block each, and a head besides the embedding, got "
                f"model.num_layers = {model.num_layers}, model.tied_embedding = {model.tied_embedding}"
            )
        return wrong
