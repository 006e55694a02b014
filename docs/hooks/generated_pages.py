"""Hook of mkdocs: adds the reference of config and recipe keys, and the programs of examples/ that pages link to."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

from schema_reference import INTRODUCTIONS, reference

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAGES = {"QuantConfig": "reference-config.md", "Recipe": "reference-recipe.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    for root in INTRODUCTIONS:
        files.append(File.generated(config, PAGES[root.__name__], content=reference(root)))
    for path in sorted(EXAMPLES.glob("*.py")):
        text = f"# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, f"examples/{path.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to examples/ lead to their pages."""
    for path in EXAMPLES.glob("*.py"):
        markdown = markdown.replace(f"](../examples/{path.name})", f"](examples/{path.stem}.md)")
    return markdown
