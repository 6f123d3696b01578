"""The events of a streamed response, numbered, from pieces of its answer. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from cacheflow.plugins.openai_server.response_items import called_item, message_item
from cacheflow.plugins.openai_server.response_schema import OutputText
from cacheflow.plugins.openai_server.tool_calls import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cacheflow.plugins.openai_server.response_schema import MessageItem, OutputItem, Response
    from cacheflow.plugins.openai_server.tool_calls import Piece

__all__ = ["Event", "EventLog"]

Event: TypeAlias = dict[str, Any]


class EventLog:
    """``state``: the response as it is at its beginning."""

    def __init__(self, state: Callable[[], Response]) -> None:
        self.output: list[OutputItem] = []
        self._state = state
        self._number = 0
        self._message: MessageItem | None = None
        self._text: list[str] = []

    def add(self, piece: Piece) -> Iterator[Event]:
        """What is to be told of the next piece."""
        yield from self._begin()
        if isinstance(piece, Call):
            yield from self._close(cut=False)
            yield from self._called(piece)
            return
        if self._message is None:
            yield from self._open()
        assert self._message is not None
        self._text.append(piece)
        yield self._part("output_text.delta", delta=piece, logprobs=[])

    def end(self, *, cut: bool) -> Iterator[Event]:
        """What is still to be told when the answer is complete, but the last event."""
        yield from self._begin()
        if self._message is None and not self.output:
            yield from self._open()
        yield from self._close(cut=cut)

    def last(self, response: Response) -> Event:
        """The last event."""
        return self._event(response.status, response=response.model_dump(mode="json"))

    def _begin(self) -> Iterator[Event]:
        if self._number:
            return
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._state().model_dump(mode="json"))

    def _open(self) -> Iterator[Event]:
        self._message = message_item(None, "in_progress")
        yield self._item("output_item.added", self._message)
        yield self._part("content_part.added", part=OutputText(text="").model_dump())

    def _close(self, *, cut: bool) -> Iterator[Event]:
        if self._message is None:
            return
        text = "".join(self._text)
        done = message_item(text, "incomplete" if cut else "completed")
        done.id = self._message.id
        yield self._part("output_text.done", text=text, logprobs=[])
        yield self._part("content_part.done", part=done.content[0].model_dump())
        yield self._item("output_item.done", done)
        self.output.append(done)
        self._message, self._text = None, []

    def _called(self, call: Call) -> Iterator[Event]:
        item = called_item(call)
        begun = item.model_copy(update={"arguments": "", "status": "in_progress"})
        where = {"item_id": item.id, "output_index": len(self.output)}
        yield self._item("output_item.added", begun)
        kind = "function_call_arguments"
        yield self._event(f"{kind}.delta", delta=item.arguments, **where)
        yield self._event(f"{kind}.done", arguments=item.arguments, name=item.name, **where)
        yield self._item("output_item.done", item)
        self.output.append(item)

    def _item(self, kind: str, item: OutputItem) -> Event:
        return self._event(kind, output_index=len(self.output), item=item.model_dump())

    def _part(self, kind: str, **what: object) -> Event:
        assert self._message is not None
        where = {"item_id": self._message.id, "output_index": len(self.output)}
        return self._event(kind, content_index=0, **where, **what)

    def _event(self, kind: str, **what: object) -> Event:
        event = {"type": f"response.{kind}", "sequence_number": self._number, **what}
        self._number += 1
        return event
