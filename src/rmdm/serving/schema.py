"""What the server is asked and what it answers: OpenAI's completions schema, and what these models can do beyond it."""

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, field_validator

from rmdm.request import MOST_SEED

MOST_CHARACTERS = 100_000
MOST_STEPS = 4096
MOST_RESAMPLING = 256
STRICT = ConfigDict(extra="forbid", strict=True)

Text = Annotated[str, StringConstraints(max_length=MOST_CHARACTERS)]
Word = Annotated[str, StringConstraints(max_length=200)]
Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]
Latent = list[list[FiniteFloat]]
Positive = Annotated[FiniteFloat, Field(gt=0, le=1000)]


class SeedEnd(BaseModel):
    """The latent that a seed draws."""

    model_config = STRICT
    seed: Seed


class StreamOptions(BaseModel):
    """What a stream holds beside the text."""

    model_config = STRICT
    include_usage: bool = False
    include_obfuscation: bool | None = Field(None, description="Ignored.")


class CompletionRequest(BaseModel):
    """A completion to write. Fields that OpenAI's API does not know come after `user`."""

    model_config = STRICT

    model: Word | None = Field(None, description="One of GET /v1/models; without it, the first.")
    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=64)] | None = Field(
        None, description="What the texts begin with; several prompts are answered n times each."
    )
    suffix: Text | None = Field(None, description="What the texts end with.")
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="The completion is cut after so many tokens; with a suffix, the gap has so many."
    )
    n: Annotated[int, Field(ge=1, le=64)] | None = Field(None, description="Texts a prompt.")
    seed: Seed | None = Field(None, description="Same seed, same texts; without one it is drawn.")
    temperature: Annotated[FiniteFloat, Field(ge=0, le=100)] | None = Field(
        None, description="Divides the logits; 0 takes the likeliest token."
    )
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    stop: Word | Annotated[list[Word], Field(max_length=4)] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Literal[0] | None = Field(None, description="Not offered.")
    logit_bias: Annotated[dict[str, FiniteFloat], Field(max_length=0)] | None = Field(None, description="Not offered.")
    best_of: Literal[1] | None = Field(None, description="Not offered.")
    presence_penalty: Literal[0] | Annotated[FiniteFloat, Field(ge=0, le=0)] | None = Field(
        None, description="Not offered."
    )
    frequency_penalty: Literal[0] | Annotated[FiniteFloat, Field(ge=0, le=0)] | None = Field(
        None, description="Not offered."
    )
    user: Word | None = Field(None, description="Ignored.")

    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = Field(None, description="Denoising steps.")
    sampler: Word | None = Field(None, description="One of the model's samplers; see GET /v1/models.")
    remask: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    spacing: Annotated[int, Field(ge=2, le=1_000_000)] | None = Field(
        None, description="Masked positions between those of a step; steps beyond so many write anew (spaced)."
    )
    guidance: Annotated[FiniteFloat, Field(ge=-1000, le=1000)] | None = Field(None, description="Weight on the latent.")
    latent_temperature: Positive | Literal["paper"] | None = None
    latent_seed: Seed | None = None
    latent: Latent | list[Latent] | None = Field(None, description="z~: (G, d_z) numbers, or (n, G, d_z).")
    like: Text | None = Field(None, description="A text whose latent to write with.")
    between: Annotated[list[Text | SeedEnd | Latent], Field(min_length=2, max_length=2)] | None = None
    weight: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    infill: Text | None = Field(
        None, description="A text with gaps, [MASK] or [MASK:3], in place of prompt and suffix."
    )
    tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="Exactly so many tokens after the prompt."
    )
    given: Literal["null", "prior", "encode", "resample"] | None = None
    draws: Annotated[int, Field(ge=1, le=MOST_RESAMPLING)] | None = None
    rounds: Annotated[int, Field(ge=1, le=MOST_RESAMPLING)] | None = None
    return_latents: bool | None = None

    @field_validator("*")
    @classmethod
    def _is_unicode(cls, value: Any) -> Any:
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise ValueError("holds half of a surrogate pair, which is no text")
        return value

    @property
    def prompts(self) -> list[str]:
        """Each prompt."""
        return self.prompt if isinstance(self.prompt, list) else [self.prompt or ""]

    @property
    def stops(self) -> list[str]:
        """Texts the completion ends before."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in given if stop]

    def with_seed(self) -> "CompletionRequest":
        """The same request with a seed of its own, where it has none."""
        return self if self.seed is not None else self.model_copy(update={"seed": secrets.randbelow(2**31)})


class Used(BaseModel):
    """How an answer came about."""

    settings: dict[str, Any]
    seconds: float
    latents: list[Latent] | None = None


class Usage(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @staticmethod
    def of(prompt: int, completion: int) -> "Usage":
        """With their sum."""
        return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


class CompletionChoice(BaseModel):
    """One text."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: None = None


class Completion(BaseModel):
    """The answer to a completion request, or a part of it in a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    rmdm: Used | None = None


class Token(BaseModel):
    """A token at a position of what is shown."""

    at: int
    id: int
    text: str
    p: float | None = None
    control: bool | None = None


class StartRow(BaseModel):
    """What a row begins with."""

    index: int
    given: list[Token]


class Start(BaseModel):
    """The first event of a denoising."""

    type: Literal["start"] = "start"
    id: str
    model: str
    steps: int
    length: int
    settings: dict[str, Any]
    rows: list[StartRow]


class StepRow(BaseModel):
    """What a step did to a row."""

    index: int
    new: list[Token]
    masked: list[int]


class Step(BaseModel):
    """A step of a denoising."""

    type: Literal["step"] = "step"
    step: int
    steps: int
    rows: list[StepRow]


class DoneRow(BaseModel):
    """A row that is done."""

    index: int
    text: str
    tokens: list[Token]
    finish_reason: Literal["stop", "length"]


class Done(BaseModel):
    """The last event of a denoising."""

    type: Literal["done"] = "done"
    rows: list[DoneRow]
    usage: Usage
    rmdm: Used


class Denoising(BaseModel):
    """All events of a denoising that was not streamed."""

    start: Start
    steps: list[Step]
    done: Done


class Ability(BaseModel):
    """What a model is and can do."""

    process: str
    parameters: int
    step: int
    length: int
    vocabulary: int
    samplers: list[str]
    settings: dict[str, Any]
    latent: bool
    has_null: bool
    reads_text: bool


class ModelCard(BaseModel):
    """A model, in OpenAI's schema."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["rmdm"] = "rmdm"
    rmdm: Ability


class ModelList(BaseModel):
    """What is served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorBody(BaseModel):
    """What is wrong with a request."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """An error, in OpenAI's schema."""

    error: ErrorBody


class Health(BaseModel):
    """Whether requests are taken."""

    status: Literal["ok"]
    models: list[str]
    waiting: int
    active_rows: int
