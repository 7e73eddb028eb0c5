"""What docs/xla.md and the tutorial for TPUs show runs as it stands (tests/fences.py)."""

import sys

import pytest

pytest.importorskip("jax", reason="needs the extra: pip install 'shardwright[xla]' (make test-xla)")

from tests.fences import copy_repository, fences, follow, run_command


def test_the_files_and_the_commands_of_the_document_run(tmp_path):
    copied = copy_repository(tmp_path)
    for fence in fences("xla.md"):
        if fence.is_file:
            path = copied / f"line{fence.line}.py"
            path.write_text(fence.text)
            run_command(f"{sys.executable} {path.name}", copied)
        for command in fence.commands:  # trainings: two steps of 150
            run_command(f"{command} --training.steps 2", copied)


def test_the_tutorial_runs_word_for_word_in_an_empty_folder_with_a_wheel(tmp_path):
    follow("tutorial-tpu.md", tmp_path)
