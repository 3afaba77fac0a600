"""Data of any origin: a text per row, or chat messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.prepare_prompts.config import Draft, PreparePromptsConfig
from tasks.row_files import RowFile, open_rows
from tasks.stage import UserError


def plain_drafts(config: PreparePromptsConfig, files: Iterator[RowFile]) -> Iterator[Draft]:
    for file in files:
        for messages in _messages_of(file, config.prompt_field, hint="; set data.prompt_field to the field that holds the text"):
            yield Draft(messages, {"problem_set": config.problem_set})


def read_messages(path: Path, *, setting: str) -> list[list[dict[str, str]]]:
    """The prompts of a file or folder, each as chat messages. Raises UserError naming `setting`, the file and the row."""
    found = [messages for file in open_rows(path, setting=setting) for messages in _messages_of(file, "prompt")]
    if not found:
        raise UserError(f"{setting}={path}: holds no prompts")
    return found


def _messages_of(file: RowFile, prompt_field: str, *, hint: str = "") -> Iterator[list[dict[str, str]]]:
    wanted = [prompt_field, "messages"]
    for number, row in file.read(wanted if set(wanted) & set(file.fields or ()) else None):
        yield _row_messages(row, f"{file.where}, row {number}", prompt_field, hint)


def _row_messages(row: Any, where: str, prompt_field: str, hint: str) -> list[dict[str, str]]:
    fields = row if isinstance(row, dict) else {}
    if isinstance(text := fields.get(prompt_field), str) and text:
        return [{"role": "user", "content": text}]
    messages = fields.get("messages")
    if isinstance(messages, str):  # as a CSV file must hold them
        try:
            messages = json.loads(messages)
        except ValueError as error:
            raise UserError(f'{where}: "messages" is text, but not JSON ({error})') from error
    well_formed = isinstance(messages, list) and messages
    if not (well_formed and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages)):
        present = f"it has: {', '.join(fields)}" if fields else "it is no object with fields"
        raise UserError(f'{where}: needs "{prompt_field}" (text) or "messages" (list of role and content); {present}{hint}')
    return [{"role": m["role"], "content": m["content"]} for m in messages]
