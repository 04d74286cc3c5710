"""The routes of the API, one module per subject."""

from __future__ import annotations

from llamasrv.api.context import ApiContext
from llamasrv.http import resume
from llamasrv.http.route import Route
from llamasrv.http.routes import (
    anthropic,
    chat,
    completion,
    decision,
    docs,
    embeddings,
    info,
    lora,
    monitor,
    openai,
    requests,
    responses,
    tokens,
    ui,
    vertex,
)
from llamasrv.http.state import ServerState


def api_routes(state: ServerState) -> list[Route]:
    """All routes. Raises FolderError when there is no folder of --path."""
    context = ApiContext(state.context)
    routes = [
        *info.routes(state, context),
        *monitor.routes(state, context),
        *tokens.routes(state, context),
        *completion.routes(state, context),
        *openai.routes(state, context),
        *chat.routes(state, context),
        *responses.routes(state, context),
        *anthropic.routes(state, context),
        *resume.routes(state),
        *requests.routes(state),
        *embeddings.routes(state, context),
        *decision.routes(state, context),
        *lora.routes(state, context),
    ]
    if state.config.vertex is not None:
        routes += vertex.routes(state, state.config.vertex, routes)
    routes += docs.routes(state, context, routes)
    taken = {(route.method, route.path) for route in routes}
    return [*routes, *(page for page in ui.routes(state) if (page.method, page.path) not in taken)]
