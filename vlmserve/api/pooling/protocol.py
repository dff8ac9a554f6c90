"""The bodies of requests for embeddings and scores: OpenAI's, Cohere's and Jina's fields, and vLLM's extensions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from vlmserve.frontend.openai.protocol import Messages, NamedRequest, RawParts, StrictModel, TokenIds, by_type


class ContentObject(StrictModel):
    """Jina's and vLLM's forms of a text, a picture, a video, or several of them: one of these fields."""

    text: str | None = None
    image: str | None = None
    video: str | None = None
    content: RawParts | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if [self.text, self.image, self.video, self.content].count(None) != 3:
            raise PydanticCustomError("content", "needs one of text, image, video and content")
        return self


Content: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[ContentObject, Tag("object")],
    by_type("must be text, or an object with text, image, video or content", text=str, object=dict),
]
Contents: TypeAlias = Annotated[
    Annotated[Content, Tag("one")] | Annotated[list[Content], Field(min_length=1), Tag("several")],
    by_type("must be a text, an object, or a list of them", one=(str, dict), several=list),
]
Input: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[ContentObject, Tag("object")] | Annotated[TokenIds, Tag("ids")],
    by_type(
        "must be text, token ids, or an object with text, image, video or content", text=str, object=dict, ids=list
    ),
]


def _several(value: Any) -> str:
    """Return which kind of list of inputs this is. A list of numbers is one input."""
    if not isinstance(value, list):
        return "one"
    return "one" if value and isinstance(value[0], int) else "several"


Inputs: TypeAlias = Annotated[
    Annotated[Input, Tag("one")] | Annotated[list[Input], Field(min_length=1), Tag("several")],
    Discriminator(_several),
]


class PooledRequest(NamedRequest):
    """Fields that all of these requests have."""

    model: str | None = None
    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    user: str | None = None


class EmbeddingRequest(PooledRequest):
    """POST /v1/embeddings: OpenAI's fields, then the extensions of vLLM and Jina. task: Jina's word for the kind of an
    input, such as retrieval.query."""

    input: Inputs | None = None
    messages: Messages | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None

    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    normalize: bool | None = None

    task: str | None = None
    embedding_type: Literal["float", "base64"] | None = None
    normalized: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise PydanticCustomError("input", "needs either an input or messages")
        return self


class CohereInput(StrictModel):
    content: RawParts


class CohereEmbedRequest(PooledRequest):
    """POST /v2/embed: Cohere's fields. input_type: names an instruction, if the checkpoint has one for it."""

    input_type: str | None = None
    texts: Annotated[list[str] | None, Field(min_length=1)] = None
    images: Annotated[list[str] | None, Field(min_length=1)] = None
    inputs: Annotated[list[CohereInput] | None, Field(min_length=1)] = None
    embedding_types: Annotated[list[Literal["float", "base64", "binary", "ubinary"]] | None, Field(min_length=1)] = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if [self.texts, self.images, self.inputs].count(None) != 2:
            raise PydanticCustomError("input", "needs one of texts, images and inputs")
        return self


class RerankRequest(PooledRequest):
    """POST /v1/rerank: the fields of Cohere and Jina, then vLLM's. instruct: another name of instruction."""

    query: Content
    documents: Annotated[list[Content], Field(min_length=1)]
    top_n: Annotated[int | None, Field(ge=1)] = None
    return_documents: bool | None = None
    instruct: str | None = None
    max_tokens_per_doc: Annotated[int | None, Field(ge=1)] = None


class PairScoreRequest(PooledRequest):
    """POST /v1/score on a reranker: vLLM's fields. text_1 and text_2 are as long, or text_1 is one."""

    text_1: Contents
    text_2: Contents
    instruct: str | None = None
