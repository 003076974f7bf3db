"""The routes. This file alone imports FastAPI; `stella.serve.run` says how to install it."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from stella.errors import StellaError
from stella.search.catalogue import Modality
from stella.search.index import Moment, OtherVersionError
from stella.serve.answers import HttpError, found_tree, id_of, place_of
from stella.serve.guard import Access, Guard
from stella.serve.media import OTHER, body, has_file, open_media, pieces
from stella.serve.served import Served
from stella.serve.work import Clip, Embed, Heat, Picture

STATIC = Path(__file__).parent / "static"
FILES = {
    "app.js": "text/javascript; charset=utf-8",
    "player.js": "text/javascript; charset=utf-8",
    "learner.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
GONE = 1.0  # seconds after which it is looked again whether a client is still there
BODY = {"requestBody": {"required": True, "content": {OTHER: {"schema": {"type": "string", "format": "binary"}}}}}

T = TypeVar("T")
router = APIRouter()
To = Annotated[Literal["video", "audio"] | None, Query(description="Compare with pictures or with sounds.")]
By = Annotated[Literal["video", "audio"] | None, Query(description="Ask by the upload's pictures or by its sound.")]
Count = Annotated[int, Query(ge=1, le=100, description="Number of moments.")]
At = Annotated[float | None, Query(ge=0, le=1e6, description="Only the window around this second.")]
Glob = Annotated[str | None, Query(max_length=500, description="Only files whose path matches, such as cats/*.")]
Id = Annotated[str, InPath(description="The id of a moment that was found, such as 3-17.")]
Label = Annotated[str | None, Query(max_length=500, description="Only files with this label.")]


class HitSchema(BaseModel):
    """A moment that fits."""

    id: str = Field(description="By which /api/moments/ID/… give more of it.")
    name: str = Field(description="Its file, below the indexed folder.")
    label: str | None = Field(description="The file's label, if it has one.")
    modality: Literal["video", "audio"] = Field(description="What was compared: its pictures or its sound.")
    start: float = Field(description="Its first second in the file.")
    end: float = Field(description="Its last second.")
    score: float = Field(description="The cosine of the angle between its vector and the query's, -1 to 1.")
    sound: bool = Field(description="Whether its file is a sound, without pictures and without a heat map.")
    whole: bool = Field(description="Whether media has its file; if not, it is a clip in a shard: play clip instead.")


class QuerySchema(BaseModel):
    by: Literal["video", "audio"] = Field(description="What was asked by.")
    start: float
    end: float


class FoundSchema(BaseModel):
    query: QuerySchema
    to: Literal["video", "audio"] = Field(description="What it was compared with.")
    hits: list[HitSchema] = Field(description="The best first.")
    seconds: float = Field(description="That the search took.")
    stale: str = Field(description="That the index is of an older model, in words; else empty.")


def create(served: Served, access: Access) -> Guard:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(served.watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.to_thread(served.close)

    about = "Search by sound and picture. A moment has an id such as 3-17. An upload is the body of a request."
    app = FastAPI(
        title="stella serve", description=about, version="1", docs_url=None, redoc_url=None, lifespan=lifespan
    )
    app.state.served = served
    app.include_router(router)
    app.add_exception_handler(StellaError, _refused)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _refused)
    app.add_exception_handler(ClientDisconnect, _refused)
    app.add_exception_handler(Exception, _refused)
    return Guard(app, access)  # around everything, answers to unforeseen errors among it


async def _refused(request: Request, error: Exception) -> Response:
    """Every failure as one sentence. What may name files is written to the log instead."""
    status, sentence, headers = 500, "the server cannot do this; its log says why", {}
    if isinstance(error, HttpError):
        status, sentence = error.status, str(error)
        headers = {"retry-after": str(error.retry)} if error.retry else {}
    elif isinstance(error, HTTPException):
        status, sentence = (
            error.status_code,
            {404: "there is nothing here", 405: "this method is not served here"}.get(
                error.status_code, "this request cannot be answered"
            ),
        )
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        said = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input ")
        status, sentence = 422, f"{first['loc'][-1]}: {said}"
    elif isinstance(error, ClientDisconnect):
        status, sentence = 400, "the upload ended early"
    else:
        served_by(request).log(f"{type(error).__name__}: {error}")
    return JSONResponse({"error": sentence}, status, headers | {"cache-control": "no-store"})


def served_by(request: Request) -> Served:
    found: Served = request.app.state.served
    return found


# ---- the page


@router.get("/", include_in_schema=False)
def page() -> Response:
    return _static("index.html", "text/html; charset=utf-8")


@router.get("/static/{name}", include_in_schema=False)
def static(name: str) -> Response:
    if name not in FILES:
        raise HTTPException(404)
    return _static(name, FILES[name])


def _static(name: str, kind: str) -> Response:
    return Response((STATIC / name).read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})


@router.get("/docs", include_in_schema=False)
def docs(request: Request) -> Response:
    """The routes as a plain page; it needs nothing from elsewhere."""
    schema = request.app.openapi()
    fields = schema["components"]["schemas"]["HitSchema"]["properties"]
    rows = [
        f"<dt><code>{method.upper()} {escape(path)}</code></dt><dd>{escape(about.get('description', ''))}"
        f"<ul>{''.join(map(_parameter, about.get('parameters', [])))}</ul></dd>"
        for path, methods in schema["paths"].items()
        for method, about in methods.items()
    ]
    hit = [_parameter({"name": name, **about}) for name, about in fields.items()]
    rows.append(f"<dt>A hit of a search</dt><dd>{HitSchema.__doc__}<ul>{''.join(hit)}</ul></dd>")
    return HTMLResponse(
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>stella serve: routes</title>'
        '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="/static/style.css">'
        f'<main class="docs"><h1>Routes</h1><p>{escape(request.app.description)} '
        '<a href="/openapi.json">openapi.json</a> '
        f"says the same for programs.</p><dl>{''.join(rows)}</dl></main></html>"
    )


def _parameter(one: dict[str, Any]) -> str:
    return f"<li><code>{escape(one['name'])}</code> {escape(one.get('description', ''))}</li>"


# ---- search


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
async def healthz(request: Request) -> dict[str, bool]:
    """Whether searches are answered: 200, or 500 if the index cannot be read. Needs no token."""
    await asyncio.to_thread(served_by(request).index.serving)
    return {"ok": True}


@router.get("/api/state")
async def state(request: Request) -> dict[str, Any]:
    """What the index holds, whether its vectors are of an older model, and what is accepted."""
    return await asyncio.to_thread(served_by(request).state)


@router.post("/api/search", openapi_extra=BODY, response_model=FoundSchema)
async def search(
    request: Request, to: To = None, by: By = None, k: Count = 12, at: At = None, path: Glob = None, label: Label = None
) -> dict[str, Any]:
    """The moments that fit the sound or video in the body: pictures for a sound, sounds for pictures, unless told."""
    served = served_by(request)
    stated = request.headers.get("content-length", "")
    async with served.uploads.received(request.stream(), int(stated) if stated.isdecimal() else None) as file:
        for last in (False, True):
            query = await _while_asked(request, served.jobs.run(Embed(served.weights(), str(file), by, at)))
            try:
                found = await asyncio.to_thread(served.index.search, query, k, to=to, path=path, label=label)
            except OtherVersionError:  # a refresh has just ended
                await asyncio.to_thread(served.versions.look)
                if last:
                    raise
            else:
                return found_tree(found, served.stale())
    raise AssertionError


@router.get("/api/moments/{id}/like", response_model=FoundSchema)
async def like(
    request: Request, id: Id, to: To = None, k: Count = 12, path: Glob = None, label: Label = None
) -> dict[str, Any]:
    """More like a moment: of what it was found by, pictures or sounds, unless told."""
    served = served_by(request)

    def find() -> dict[str, Any]:
        moment = served.moment(id)
        target: Modality = to or moment.hit.modality
        found = served.index.search(moment.query, k + 1, to=target, path=path, label=label)
        tree = found_tree(found, served.stale())
        tree["hits"] = [hit for hit in tree["hits"] if hit["id"] != id_of(place_of(id))][:k]
        return tree

    return await asyncio.to_thread(find)


# ---- the learner


@router.get("/api/learner")
async def learner(request: Request) -> dict[str, Any]:
    """The learner that made the index: its state, its history, and the clips it is forgetting. 404 if none did."""
    return await asyncio.to_thread(lambda: served_by(request).learner().tree())


@router.get("/api/learner/clips/{key}")
async def forgotten(request: Request, key: str) -> Response:
    """A JPEG of a clip that the learner is forgetting."""
    return _kept(await asyncio.to_thread(lambda: served_by(request).learner().picture(key)), "image/jpeg")


# ---- moments


@router.head("/api/moments/{id}/media", include_in_schema=False)
@router.get("/api/moments/{id}/media")
def media(request: Request, id: Id) -> Response:
    """The whole file of a moment, with HTTP ranges."""
    moment = served_by(request).moment(id)
    file, kind = open_media(moment)
    tag = f'"{moment.size:x}-{moment.mtime:x}"'
    answer = body(moment.size, kind, tag, request.headers.get("range"), request.headers.get("if-range"))
    if request.method == "HEAD" or not answer.count:
        file.close()
        return Response(None, answer.status, answer.headers)
    return StreamingResponse(pieces(file, answer.first, answer.count), answer.status, answer.headers)


@router.get("/api/moments/{id}/clip")
async def clip(request: Request, id: Id) -> Response:
    """The moment alone, as an mp4 or FLAC that every browser plays; with HTTP ranges."""
    data = await _derived(request, id, Clip)
    kind = "audio/flac" if data.startswith(b"fLaC") else "video/mp4"
    tag = f'"{zlib.crc32(data):x}"'
    answer = body(len(data), kind, tag, request.headers.get("range"), request.headers.get("if-range"))
    return Response(data[answer.first : answer.first + answer.count], answer.status, answer.headers)


@router.get("/api/moments/{id}/picture")
async def picture(request: Request, id: Id) -> Response:
    """A JPEG of the moment; of a sound, its spectrogram."""
    return _kept(await _derived(request, id, Picture), "image/jpeg")


@router.get("/api/moments/{id}/heat")
async def heat(request: Request, id: Id) -> Response:
    """Where the moment's sound comes from (maps of the centre square, 0 to 255), and which seconds of it matter."""
    return _kept(await _derived(request, id, Heat), "application/json")


def _kept(data: bytes, kind: str) -> Response:
    return Response(data, media_type=kind, headers={"cache-control": "private, max-age=3600"})


async def _derived(request: Request, id: str, job: type[Clip | Heat | Picture]) -> bytes:
    served = served_by(request)
    moment: Moment = await asyncio.to_thread(served.moment, id)
    there = await asyncio.to_thread(has_file, moment)
    weights, hit = served.weights() if job is Heat else None, moment.hit
    part = job(weights, hit.root, hit.path, hit.start, hit.end, (moment.size, moment.mtime))
    return await _while_asked(request, served.cache.get((part, there), partial(served.jobs.run, part)))


async def _while_asked(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, which is cancelled when its client has gone: a job that waits is then never begun."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=GONE)
            if not task.done() and await request.is_disconnected():
                raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
