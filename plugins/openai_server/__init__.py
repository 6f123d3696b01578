"""An OpenAI-compatible server over sessions: chat completions, completions, responses."""

from __future__ import annotations

from cacheflow.plugins.openai_server.app import create_app
from cacheflow.plugins.openai_server.serving import opened_service, serve
from cacheflow.plugins.openai_server.settings import ApiKey, ServerSettings

__all__ = ["ApiKey", "ServerSettings", "create_app", "opened_service", "serve"]
