"""The tab that searches the pictures of a folder by a sentence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import gradio as gr

from vlmserve.commands.client.chat_client import ServerError
from vlmserve.commands.demo import panels
from vlmserve.commands.demo.search import MOST, Album, Search


class SearchTab:
    """Gradio's components of the tab, in the block that is open, and what its events call. search: a text says why the
    served model cannot search."""

    def __init__(self, search: Search | str) -> None:
        if isinstance(search, str):
            gr.HTML(panels.no_search(search), elem_id="no-search")
            return
        self._search = search
        album = gr.State(Album())
        files = gr.File(label="a folder of pictures", file_count="directory", height=140, elem_id="folder")
        seen = gr.HTML(panels.album(Album()), elem_id="album")
        box = gr.Textbox(
            label="sentence",
            show_label=False,
            placeholder="What the pictures are to show",
            submit_btn=True,
            max_lines=1,
            elem_id="sentence",
        )
        found = gr.HTML(elem_id="found")
        box.submit(self._find, [box, album], found, api_name="find", concurrency_limit=None)
        looked = files.upload(
            self._look_at,
            files,
            [album, seen, found],
            api_name="look_at",
            concurrency_limit=None,
            trigger_mode="always_last",
            show_progress="hidden",
        )
        files.clear(
            lambda: (Album(), panels.album(Album()), ""),
            None,
            [album, seen, found],
            cancels=looked,
            api_visibility="private",
        )

    async def _look_at(self, files: list[str] | None) -> AsyncIterator[list[Any]]:
        """Make vectors of the pictures of a folder. (The page's own API shows this text and the names.)"""
        paths = sorted(map(Path, files or ()), key=lambda path: path.name)
        async with aclosing(self._search.look_at(paths)) as albums:
            async for album in albums:
                yield [album, panels.album(album, left=len(paths) - MOST), gr.skip() if album.pictures else ""]

    async def _find(self, sentence: str, album: Album) -> str:
        """Find the pictures of the folder that show what a sentence says."""
        if not sentence.strip() or not album.pictures:
            return panels.not_found("Add a folder of pictures first" if sentence.strip() else "Write a sentence first")
        try:
            vector = await self._search.vector_of(sentence)
        except ServerError as error:
            return panels.not_found(str(error))
        return await asyncio.to_thread(lambda: panels.found(album.nearest(vector)))
